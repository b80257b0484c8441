"""How long one attention layer would take on many ranks: a simulation, not a measurement.

Three terms, each with its assumptions in `Machine`:

- the local passes: floating-point operations / rate;
- what travels: the bytes of `lln_lab.benchmarks.traffic` / bandwidth;
- waiting: a latency for every collective.

They are added up, except for ring attention, whose transfers are assumed to hide behind its passes
as far as they can. That favours ring attention: some of ours travel while a rank computes, too, and
are counted as if it waited.

Dimension legend: R ranks, B batch, H query heads, N tokens of the whole sequence, T of a rank, D
head width, E value width, W tokens in a block, K keys per group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lln.errors import InvalidInputError
from lln_lab.benchmarks.traffic import LayerShape, layer_traffic

# A backward pass of softmax attention computes the scores again and has four more products for the
# two of the forward pass; that of the linear passes has two products for each of theirs.
_SOFTMAX_BACKWARD, _LINEAR_BACKWARD = 2.5, 2.0


@dataclass(frozen=True)
class Machine:
    """What is assumed of the ranks and of what lies between them: nodes of 8 H100-like GPUs.

    Attributes:
        softmax_rate: Operations per second of fused softmax attention, forward and backward: about
            what the fastest of docs/benchmarks.md has on one H200.
        linear_rate: Of the local passes of ``lln`` and ``lln_diag``: what a rank among several has
            on one H200 (lab/results/benchmarks/parallel-layer.json, a million tokens of ``lln``).
        keys_rate: Of those of ``lln_keys``: the same, of its million tokens.
        node_ranks: Ranks in a node.
        node_bandwidth: Bytes per second that a rank sends inside its node.
        network_bandwidth: Bytes per second that a rank sends when the group spans several nodes.
        collective_latency: Seconds that a collective waits, per doubling of the ranks.
        send_latency: Seconds that a message to the next rank of a ring waits.
        memory_bandwidth: Bytes per second at which a rank reads the summaries that it merges.
        memory: Bytes of a rank.
    """

    softmax_rate: float = 400e12
    linear_rate: float = 96e12
    keys_rate: float = 83e12
    node_ranks: int = 8
    node_bandwidth: float = 400e9
    network_bandwidth: float = 50e9
    collective_latency: float = 10e-6
    send_latency: float = 10e-6
    memory_bandwidth: float = 3e12
    memory: float = 80e9


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a training step, forward and backward, in one layer.

    Attributes:
        passes: Of the local passes.
        transfer: Of the bytes on their way.
        waiting: Of the latencies.
        total: Of everything; less than the sum where transfers hide behind passes.
        fits: Whether query, key, value, output and their gradients fit into a rank's memory.
    """

    passes: float
    transfer: float
    waiting: float
    total: float
    fits: bool


def layer_time(
    kind: str, shape: LayerShape, machine: Machine | None = None, rank: int = 0
) -> LayerTime:
    """The simulated time of one layer, bidirectional, in a training step.

    Args:
        kind: As in `lln_lab.benchmarks.traffic.layer_traffic`.
        shape: The sizes of the layer.
        machine: What is assumed; None = the defaults of `Machine`.
        rank: Which rank.

    Raises:
        InvalidInputError: If the heads cannot be divided between the ranks, as Ulysses does.

    Example:
        >>> shape = LayerShape((131_072,) * 8, heads=16, width=64, asked=False)
        >>> ours, ring = (layer_time(kind, shape).total for kind in ("lln", "ring"))
        >>> round(ring / ours)
        4194
    """
    machine = machine or Machine()
    ranks, key_heads = len(shape.lengths), shape.grouped[0]
    if kind == "ulysses" and key_heads % ranks:
        raise InvalidInputError(
            f"ulysses gives every rank the same number of heads, and {key_heads} key heads cannot "
            f"be divided between {ranks} ranks; choose a number of ranks that divides them."
        )
    traffic = layer_traffic(kind, shape, rank)
    near = ranks <= machine.node_ranks
    bandwidth = machine.node_bandwidth if near else machine.network_bandwidth
    transfer = traffic.total / bandwidth
    passes = _passes(kind, shape, machine, rank)
    doublings = math.ceil(math.log2(ranks))
    if kind == "ring":
        # One rank further at a time: keys and values forward, and once more with their gradients.
        waiting = (2 * ranks - 1) * machine.send_latency if ranks > 1 else 0.0
        total = max(passes, transfer + waiting)
    else:
        # Of ulysses: query, key, value and output, in both directions.
        calls = 8 if kind == "ulysses" else len(traffic.forward) + len(traffic.backward)
        waiting = calls * doublings * machine.collective_latency
        total = passes + transfer + waiting
    return LayerTime(passes, transfer, waiting, total, _bytes(shape, rank) <= machine.memory)


def _passes(kind: str, shape: LayerShape, machine: Machine, rank: int) -> float:
    """Seconds of this rank's own work."""
    value_width = shape.grouped[1]
    own, whole = shape.lengths[rank], shape.bounds.tokens
    heads = shape.batch * shape.heads
    # A multiplication and an addition for every channel of the score and of the value.
    pair = 2 * heads * (shape.width + value_width)
    if kind in ("ring", "ulysses"):
        return (1 + _SOFTMAX_BACKWARD) * pair * own * whole / machine.softmax_rate
    # The summary is written and read once: D·E numbers for every token.
    linear = (1 + _LINEAR_BACKWARD) * 4 * heads * own * shape.width * value_width
    seen = {"lln": 0, "lln_diag": shape.block_size}.get(kind, shape.block_size + shape.keys)
    exact = (1 + _SOFTMAX_BACKWARD) * pair * own * min(seen, whole)
    if kind == "lln_keys":
        # The mean query of every group of the sequence meets every key of this rank.
        groups = whole / (shape.group_size or shape.block_size)
        exact += 2 * heads * shape.width * groups * own
    columns = value_width + (3 if kind == "lln_keys" else 1)
    summaries = len(shape.lengths) * shape.wide * heads * shape.width * columns
    # Merged forward; backward their gradients are written.
    merging = 2 * summaries / machine.memory_bandwidth
    rate = machine.keys_rate if kind == "lln_keys" else machine.linear_rate
    return (linear + exact) / rate + merging


def _bytes(shape: LayerShape, rank: int) -> int:
    """Query, key, value, output and their gradients."""
    key_heads, value_width = shape.grouped
    numbers = (shape.heads + key_heads) * (shape.width + value_width)
    return 2 * shape.dtype.itemsize * shape.batch * shape.lengths[rank] * numbers
