"""The same steps as `lln.eager.summary` and `lln.eager.diagonal`, fused for the GPU in Triton."""
