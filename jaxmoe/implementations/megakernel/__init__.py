"""The fused implementation: one call of compiled code per rank and layer."""
