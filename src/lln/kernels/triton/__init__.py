"""The Triton kernels; imported when one first runs, never by ``import lln``.

Shared parts: `steps` (load, exponents, softmax rows), `mixing` (LLN with the diagonal part),
`backward_ranges` (gradients of a range of tokens), `order` (one launch after another).
Launched by `lln.kernels.launch`: `summaries`, `forward`, `backward`; by
`lln.kernels.launch_causal`: `causal_chunks` and `causal_walks`. Launched by their own file:
`blocks` (diagonal alone), `decode` (one token), `statistics_pass` (moments, α and β), `gaps` (where
blocks begin).
"""
