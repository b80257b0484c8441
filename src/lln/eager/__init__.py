"""Attention in plain PyTorch: any device, differentiable, exportable; kernels are tested on it."""
