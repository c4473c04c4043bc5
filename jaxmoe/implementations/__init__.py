"""What `moe_layer` runs on each rank: `reference.py` (the truth), `xla/` (portable), `megakernel/` (fused)."""
