"""The layer that `jaxmoe.nnx` and `jaxmoe.linen` wrap; nothing here imports Flax."""
