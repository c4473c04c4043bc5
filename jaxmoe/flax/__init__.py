"""The layer that `jaxmoe.nnx` and `jaxmoe.linen` wrap: its parameters and its maths; `serialization.py` imports Flax."""
