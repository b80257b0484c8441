"""Calls of a whole sequence by one process, and of its shards by several, to be compared."""

from functools import partial

import torch

import lln
import lln.parallel

ALONE = {
    "lln": lln.lln_attention,
    "lln_diag": lln.lln_diag_attention,
    "lln_keys": lln.lln_keys_attention,
}
TOGETHER = {
    "lln": lln.parallel.lln_attention,
    "lln_diag": lln.parallel.lln_diag_attention,
    "lln_keys": lln.parallel.lln_keys_attention,
}
LEARNED = ("alpha", "beta", "offset", "mix")
# Of what belongs to a token: the axis of tokens.
AXES = {"query": 2, "key": 2, "value": 2, "key_mask": 1, "upstream": 2, "mix": 2}


def inputs_of(case):
    """The tensors of a case, the same in every process."""
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    randn = partial(torch.randn, generator=generator, dtype=case.get("dtype", torch.float64))
    batch, heads, key_heads = case.get("batch", 2), case.get("heads", 2), case.get("key_heads", 2)
    keys = sum(case["lengths"])
    queries = sum(case.get("query_lengths", case["lengths"]))
    width, value_width = case.get("width", 5), case.get("value_width", 3)
    tensors = {
        "query": randn(batch, heads, queries, width),
        "key": randn(batch, key_heads, keys, width) * case.get("spread", 1.0)
        + case.get("shift", 0.3),
        "value": randn(batch, key_heads, keys, value_width),
        "upstream": randn(batch, heads, queries, value_width),
    }
    drawn = randn(2, batch, heads, 1, 1)
    for name in case.get("learn", ()):
        number = drawn[0 if name == "alpha" else 1]
        tensors[name] = number if name == "offset" else 1.5 + 0.5 * torch.tanh(number)
    if "mix" in case.get("learn", ()):
        tensors["mix"] = torch.sigmoid(randn(batch, heads, queries, 1))
    if case.get("key_head_beta"):
        tensors["beta"] = tensors["beta"][:, :key_heads].clone()
    if "hidden" in case:
        mask = torch.ones(batch, keys, dtype=torch.bool)
        for sample, start, end in case["hidden"]:
            mask[sample, start:end] = False
            # Whatever a masked place holds has no effect.
            tensors["key"][sample, :, start:end] = float("nan")
            tensors["value"][sample, :, start:end] = float("nan")
            if case.get("spoils_queries"):
                tensors["query"][sample, :, start:end] = float("nan")
                # A padded query may have an output and a gradient of its own; nobody asks for it.
                tensors["upstream"][sample, :, start:end] = 0.0
        tensors["key_mask"] = mask
    if "cast" in case:
        tensors = {
            name: side.to(case["cast"]) if side.is_floating_point() else side
            for name, side in tensors.items()
        }
    return tensors


def call(attend, tensors, options):
    """The output and the gradients of everything that can have one."""
    leaves = {
        name: tensor.clone().requires_grad_(tensor.is_floating_point())
        for name, tensor in tensors.items()
        if name != "upstream"
    }
    out = attend(**leaves, **options)
    (out * tensors["upstream"]).sum().backward()
    grads = {name: side.grad for name, side in leaves.items() if side.grad is not None}
    return {"out": out.detach(), **grads}


def by_one(case):
    """The whole call in this process."""
    return call(ALONE[case["kind"]], inputs_of(case), case.get("options", {}))


def shard_of(tensors, case, rank):
    """A rank's piece of every tensor."""
    shards = {}
    for name, tensor in tensors.items():
        axis = AXES.get(name)
        if axis is None:
            shards[name] = tensor
            continue
        queries = name in ("query", "upstream", "mix")
        lengths = case.get("query_lengths", case["lengths"]) if queries else case["lengths"]
        shards[name] = tensor.split(lengths, axis)[rank]
    if "key_mask" in shards and rank not in case.get("masked_ranks", range(len(case["lengths"]))):
        assert bool(shards.pop("key_mask").all())
    return shards


def by_rank(group, rank, case):
    """A rank's part of the call, in its process."""
    options = dict(case.get("options", {}), group=group)
    if case.get("lengths_known"):
        options["lengths"] = case["lengths"]
    return call(TOGETHER[case["kind"]], shard_of(inputs_of(case), case, rank), options)


def joined(parts):
    """The ranks' results as those of one process: tokens in a row, gradients of weights added."""
    whole = {}
    for name in parts[0]:
        sides = [part[name] for part in parts]
        axis = 2 if name == "out" else AXES.get(name)
        whole[name] = torch.cat(sides, axis) if axis else torch.stack(sides).sum(0)
    return whole


def assert_same(parts, alone, tolerance=1e-12):
    """Outputs and gradients agree with those of one process, relative to their largest number."""
    whole = joined(parts)
    assert set(whole) == set(alone)
    for name, expected in alone.items():
        found = whole[name]
        assert found.shape == expected.shape, name
        assert bool(found.isfinite().all()), name
        size = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
        error = (found - expected).abs().max().item() / size if expected.numel() else 0.0
        assert error <= tolerance, f"{name} is off by {error:.1e}"
