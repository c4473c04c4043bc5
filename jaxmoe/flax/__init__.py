"""The layer that `jaxmoe.nnx` and `jaxmoe.linen` wrap: its parameters and its maths; nothing here imports Flax."""
