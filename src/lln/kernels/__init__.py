"""The same steps as `lln.summary` and `lln.diagonal`, fused for the GPU in Triton."""
