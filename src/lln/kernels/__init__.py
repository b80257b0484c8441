"""Triton kernels, grouped by attention: the same steps as in `lln.eager`, fused.

`launching` sends kernels to a device, whichever they are. `summaries` has the passes of LLN
attention and the step that adds a token, `causal` the passes of its causal form, `lln` the whole
calls. `blocks` is diagonal attention and windows, `keys` attention with exact keys, `pages` that to
a window, sinks and pages, `moments` measures queries and keys.

In every folder ``triton_….py`` is written in Triton's language, ``launch_….py`` goes from tensors
to those kernels, and ``…_ops.py`` makes operators of them. Triton is imported when a kernel first
runs, never by ``import lln``: what is imported earlier imports the launches inside functions.
"""
