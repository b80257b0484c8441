"""Attention in plain PyTorch: any device, differentiable, exportable; kernels are tested on it.

To learn the method from it, read in this order: `summary` (keys and values into a summary, queries
that read it), `diagonal` (softmax inside blocks), `band` (inside sliding windows), `run` (both
together), `scan` and `causal` (every row sees the past only), `key_attention` (exact keys beside
the summary) with `selection` (which keys). The others serve these: `packing`, `tiling` and
`padding` for sequences without padding between them, `causal_walk` for the same results in less
time.
"""
