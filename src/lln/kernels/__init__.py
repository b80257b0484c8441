"""The same steps as in `lln.eager.summary` and `lln.eager.diagonal`, fused in Triton kernels."""
