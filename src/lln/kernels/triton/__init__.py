"""The kernels themselves, written in Triton's language; imported when one first runs."""
