"""The kernels, in Triton's language; imported when one first runs, never by ``import lln``.

Made of: `steps` (load, exponents, softmax rows), `mixing` (LLN with the diagonal part),
`backward_ranges` (gradients of a range of tokens).
Kernels that `lln.kernels.launch` launches: `summaries`, `forward`, `backward`, and for causal calls
`causal_walks`. Kernels with a launch of their own in the same file: `blocks` (diagonal alone),
`decode` (one token), `statistics_pass` (moments, α and β), `gaps` (where blocks begin).
"""
