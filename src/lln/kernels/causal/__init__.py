"""Causal LLN attention: walks that carry a summary along, and chunks that start from states.

*Walks*: a program goes over the tiles of its stretch (its share of the tokens) and updates a state
on the way, the summary of all earlier keys. `triton_walk_tiles` has the steps of a walk, the
equations of a row and the guard that detects when a row has lost its digits; `triton_walk_exact`
the scores that repair it; `triton_walk_states` the state a stretch starts from. The walks are
`triton_walk_outputs` in the forward pass; in the backward pass `triton_walk_queries` for dq, then
`triton_walk_keys` for dk and dv, which starts from what `triton_walk_states` has summed over the
later stretches.

*Chunks*: a chunk is one tile of tokens. First one program per stretch writes the state before each
of its chunks; then every chunk is computed by itself, all at once. That moves more memory than a
walk, which carries its state on the chip, and waits less. Stretches whose rows lost digits are
walked again, exactly.

x = α q and y = β k throughout; every query head has its own walk, and KG of them share a key head.
"""
