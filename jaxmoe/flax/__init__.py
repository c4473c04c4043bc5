"""What `jaxmoe.nnx` and `jaxmoe.linen` wrap: parameters of a layer and its maths; `serialization.py` imports Flax."""
