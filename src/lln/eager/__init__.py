"""Attention in plain PyTorch: any device, differentiable, exportable; the judge of the kernels."""
