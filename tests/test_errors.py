"""Bad inputs are refused with one clear sentence; legal oddities are not."""

import re
import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import lln
from lln import BackendUnavailableError, CausalStatisticsError, InvalidInputError
from lln.testing import assert_close

B, H, T, D, E = 2, 4, 6, 8, 5
NAN, INF = float("nan"), float("inf")


def dense(**changed):
    shapes = {"query": (B, H, T, D), "key": (B, H, T, D), "value": (B, H, T, E)} | changed
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def packed(**changed):
    return dense(**({"query": (T, H, D), "key": (T, H, D), "value": (T, H, E)} | changed))


def bounds(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


def block_diagonal(query, key, value, **options):
    return lln.block_diagonal_attention(query, key, value, **({"block_size": 4} | options))


def window(query, key, value, **options):
    return lln.window_attention(query, key, value, **({"window": 4} | options))


def window_varlen(query, key, value, cu_seqlens, **options):
    return lln.window_attention_varlen(query, key, value, cu_seqlens, window=4, **options)


DENSE = {
    "lln": lln.lln_attention,
    "diag": lln.lln_diag_attention,
    "block": block_diagonal,
    "window": window,
}
PACKED = {
    "lln": lln.lln_attention_varlen,
    "diag": lln.lln_diag_attention_varlen,
    "window": window_varlen,
}
LLN_ONLY = ("lln", "diag")
each_dense = pytest.mark.parametrize("attend", DENSE.values(), ids=DENSE)
each_packed = pytest.mark.parametrize("attend", PACKED.values(), ids=PACKED)
each_lln = pytest.mark.parametrize("attend", [DENSE[n] for n in LLN_ONLY], ids=LLN_ONLY)
each_lln_packed = pytest.mark.parametrize("attend", [PACKED[n] for n in LLN_ONLY], ids=LLN_ONLY)
# Without α and β.
SOFTMAX = (block_diagonal, window)
each_name = pytest.mark.parametrize("name", ["query", "key", "value"])


def refuses(call, *fragments, error=InvalidInputError, untouched=()):
    """The call must raise exactly this error, in one sentence with all fragments in it."""
    versions = [tensor._version for tensor in untouched]
    with pytest.raises(lln.LLNError) as caught:
        call()
    assert caught.type is error
    message = str(caught.value)
    assert len(message) < 300, message
    assert "\n" not in message
    assert message.endswith("."), message
    assert not re.search(r"[.!?]\s+[A-ZΑ-Ω]", message), f"more than one sentence: {message}"
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert [tensor._version for tensor in untouched] == versions


def refuses_dense(attend, tensors, *fragments, **options):
    error = options.pop("error", InvalidInputError)
    call = lambda: attend(**tensors, **options)  # noqa: E731
    seen = [t for t in tensors.values() if isinstance(t, torch.Tensor)]
    refuses(call, *fragments, error=error, untouched=seen)


def refuses_packed(attend, tensors, cu_seqlens, *fragments, **options):
    refuses_dense(attend, tensors | {"cu_seqlens": cu_seqlens}, *fragments, **options)


# 1 to 8: query, key and value


@each_dense
@each_name
@pytest.mark.parametrize("shape", [(D,), (T, D), (H, T, D), (1, B, H, T, D)])
def test_wrong_rank(attend, name, shape):
    seen = str(list(shape))
    refuses_dense(attend, dense(**{name: shape}), name, "4 dimensions [B, H, T, D]", seen)


@each_packed
@each_name
@pytest.mark.parametrize("shape", [(D,), (T, D), (1, T, H, D)])
def test_wrong_rank_packed(attend, name, shape):
    tensors = packed(**{name: shape})
    refuses_packed(attend, tensors, bounds(0, T), name, "3 dimensions [T, H, D]", str(list(shape)))


@each_dense
@pytest.mark.parametrize("name", ["key", "value"])
def test_different_dtypes(attend, name):
    tensors = dense()
    tensors[name] = tensors[name].double()
    refuses_dense(attend, tensors, "one dtype", "torch.float32", f"{name} torch.float64")


@each_dense
@pytest.mark.parametrize("name", ["key", "value"])
def test_different_devices(attend, name):
    tensors = dense()
    tensors[name] = tensors[name].to("meta")
    refuses_dense(attend, tensors, "one device", "query on cpu", f"{name} on meta")


@each_dense
def test_different_head_widths(attend):
    refuses_dense(attend, dense(key=(B, H, T, 7)), "query and key", "head width", "8 and 7")


@each_dense
def test_zero_head_width(attend):
    tensors = dense(query=(B, H, T, 0), key=(B, H, T, 0))
    refuses_dense(attend, tensors, "head width", "at least 1", "got 0")


@each_dense
def test_key_and_value_of_different_length(attend):
    refuses_dense(attend, dense(value=(B, H, 4, E)), "key and value", "tokens", "6 and 4")


@each_dense
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["key", "value"])
def test_batch_is_never_broadcast(attend, name, batch):
    width = E if name == "value" else D
    tensors = dense(**{name: (batch, H, T, width)})
    refuses_dense(attend, tensors, f"query and {name}", "batch size", f"2 and {batch}")


@each_dense
def test_key_and_value_of_different_heads(attend):
    tensors = dense(value=(B, 2, T, E))
    refuses_dense(attend, tensors, "key and value", "heads", "4 and 2", enable_gqa=True)


@each_dense
def test_grouped_heads_need_enable_gqa(attend):
    tensors = dense(key=(B, 2, T, D), value=(B, 2, T, E))
    refuses_dense(attend, tensors, "query has 4 heads", "key has 2", "enable_gqa=True")
    attend(**tensors, enable_gqa=True)


@each_dense
@pytest.mark.parametrize("heads", [0, 3, 8])
def test_heads_that_cannot_be_grouped_are_not_told_to(attend, heads):
    tensors = dense(key=(B, heads, T, D), value=(B, heads, T, E))
    refuses_dense(
        attend, tensors, "4 heads", f"has {heads}", "as many heads as query, or a divisor"
    )


@each_dense
@pytest.mark.parametrize("heads", [0, 3, 8])
def test_query_heads_not_a_multiple(attend, heads):
    tensors = dense(key=(B, heads, T, D), value=(B, heads, T, E))
    refuses_dense(attend, tensors, "multiple", f"4 and {heads}", enable_gqa=True)


@each_dense
@each_name
@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_wrong_dtype(attend, name, dtype):
    tensors = dense()
    tensors[name] = tensors[name].to(dtype)
    refuses_dense(attend, tensors, name, "float32, bfloat16 or float16", str(dtype))


@each_dense
@each_name
@pytest.mark.parametrize(("thing", "seen"), [(None, "NoneType"), ([[0.0]], "list")])
def test_not_a_tensor(attend, name, thing, seen):
    refuses_dense(attend, dense() | {name: thing}, name, "torch.Tensor", seen)


@each_packed
def test_packed_query_and_key_of_different_length(attend):
    tensors = packed(key=(4, H, D), value=(4, H, E))
    refuses_packed(attend, tensors, bounds(0, T), "same number of tokens", "6 and 4")


def alike(*shape, **options):
    return {name: torch.ones(shape, **options) for name in ("query", "key", "value")}


@each_dense
def test_tensors_that_are_alike_but_wrong(attend):
    """Three tensors of one shape take a shorter way through the checks: the same sentences."""
    tensors = alike(B, H, T, D)
    assert attend(**tensors).shape == (B, H, T, D)
    refuses_dense(attend, alike(H, T, D), "query", "4 dimensions [B, H, T, D]")
    refuses_dense(attend, alike(B, H, T, 0), "head width", "at least 1", "got 0")
    refuses_dense(attend, alike(B, H, T, D, dtype=torch.int64), "query", "float64", "int64")
    for name in ("key", "value"):
        other = tensors | {name: tensors[name].double()}
        refuses_dense(attend, other, "one dtype", f"{name} torch.float64")
        other = tensors | {name: tensors[name].to("meta")}
        refuses_dense(attend, other, "one device", f"{name} on meta")


@each_name
def test_nested_tensor_of_the_old_layout(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.randn(H, 3, D)], layout=torch.strided)
    refuses_dense(lln.lln_attention, alike(1, H, 3, D) | {name: nested}, name, "nested", "_varlen")


def test_nested_tensor():
    nested = torch.nested.nested_tensor([torch.randn(H, 3, D)], layout=torch.jagged)
    refuses_dense(lln.lln_attention, dense() | {"query": nested}, "query", "nested", "_varlen")


def compressed(tensor, layout):
    """The tensor in a sparse layout; rows of the compressed one are those of its last two axes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.to_sparse(layout=layout)


each_sparse = pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)


@each_dense
@each_name
@each_sparse
def test_sparse_tensors(attend, name, layout):
    tensors = dense(value=(B, H, T, D))
    tensors[name] = compressed(tensors[name], layout)
    refuses_dense(attend, tensors, name, str(layout), f"{name}.to_dense()")


@each_dense
@each_sparse
def test_sparse_tensors_that_are_alike(attend, layout):
    tensors = {n: compressed(t, layout) for n, t in alike(B, H, T, D).items()}
    refuses_dense(attend, tensors, "query", "query.to_dense()")


@each_packed
def test_sparse_tensors_packed(attend):
    tensors = {n: t.to_sparse() for n, t in packed().items()}
    refuses_packed(attend, tensors, bounds(0, T), "query.to_dense()")
    refuses_packed(attend, packed(), bounds(0, T).to_sparse(), "cu_seqlens.to_dense()")


@each_dense
@each_sparse
def test_sparse_mask(attend, layout):
    bad = compressed(mask(), layout)
    refuses_dense(attend, dense(), "key_mask.to_dense()", key_mask=bad)


def test_sparse_temperatures_and_mix():
    bad = torch.ones(B, H, 1, 1).to_sparse()
    refuses_dense(lln.lln_attention, dense(), "alpha.to_dense()", alpha=bad, beta=1.0)
    refuses_dense(lln.lln_attention, dense(), "beta.to_dense()", alpha=1.0, beta=bad)
    refuses_dense(lln.lln_diag_attention, dense(), "mix.to_dense()", mix=bad)


@each_name
def test_quantised_tensors(name):
    tensors = dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors[name] = torch.quantize_per_tensor(tensors[name], 0.1, 0, torch.qint8)
    refuses_dense(lln.lln_attention, tensors, name, "torch.qint8", f"{name}.dequantize()")


# 9 and 10: masks


def mask(*shape, dtype=torch.bool, device="cpu"):
    return torch.ones(shape or (B, T), dtype=dtype, device=device)


@each_dense
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
def test_mask_of_wrong_dtype(attend, dtype):
    bad = mask(dtype=dtype)
    refuses_dense(attend, dense(), "key_mask", "bool", "True = attend", str(dtype), key_mask=bad)


@each_dense
@pytest.mark.parametrize("shape", [(T,), (B, 1, T), (B, 1, 1, T), (B, H, T, T)])
def test_mask_of_wrong_rank(attend, shape):
    seen = str(list(shape))
    refuses_dense(attend, dense(), "key_mask", "[B, S] = [2, 6]", seen, key_mask=mask(*shape))


@each_dense
@pytest.mark.parametrize("shape", [(B, 5), (1, T), (T, B)])
def test_mask_of_wrong_size(attend, shape):
    seen = str(list(shape))
    refuses_dense(attend, dense(), "key_mask", "[B, S] = [2, 6]", seen, key_mask=mask(*shape))


@each_dense
def test_mask_on_another_device(attend):
    bad = mask(device="meta")
    refuses_dense(attend, dense(), "key_mask", "device", "meta and cpu", key_mask=bad)


@each_dense
def test_mask_that_is_no_tensor(attend):
    refuses_dense(attend, dense(), "key_mask", "bool", "list", key_mask=[True] * T)


@each_packed
def test_mask_with_cu_seqlens(attend):
    bad = torch.ones(1, T, dtype=torch.bool)
    refuses_packed(
        attend, packed(), bounds(0, T), "key_mask and cu_seqlens", "cannot", key_mask=bad
    )


# 11 and 12: causal


@pytest.mark.parametrize("keys", [3, 7])
def test_causal_needs_as_many_queries_as_keys(keys):
    tensors = dense(key=(B, H, keys, D), value=(B, H, keys, E))
    options = {"alpha": 1.0, "beta": 1.0, "is_causal": True}
    refuses_dense(
        lln.lln_attention, tensors, "is_causal", f"T = 6 and S = {keys}", "KeySummary", **options
    )


@each_lln
@pytest.mark.parametrize("matching", ["variance", "entropy", "paper"])
def test_causal_with_statistics_of_its_own_sequence(attend, matching):
    refuses_dense(
        attend,
        dense(),
        "causal",
        "alpha and beta",
        "future",
        error=CausalStatisticsError,
        is_causal=True,
        matching=matching,
    )


@each_lln_packed
def test_causal_packed_with_statistics_of_its_own_sequence(attend):
    refuses_packed(
        attend, packed(), bounds(0, T), "causal", error=CausalStatisticsError, is_causal=True
    )


@pytest.mark.parametrize("name", ["block", "diag", "window"])
def test_blocks_are_self_attention(name):
    tensors = dense(key=(B, H, 4, D), value=(B, H, 4, E))
    refuses_dense(DENSE[name], tensors, "same positions", "T = 6 and S = 4", "lln_attention")


# 13: cu_seqlens


@each_packed
@pytest.mark.parametrize(
    ("cu_seqlens", "fragments"),
    [
        ([0, T], ("int32 or int64 tensor", "list")),
        (torch.tensor([0.0, T]), ("int32 or int64", "torch.float32")),
        (torch.tensor([0, T], dtype=torch.int16), ("int32 or int64", "torch.int16")),
        (torch.tensor([[0, T]]), ("1-D", "[1, 2]")),
        (torch.tensor(0), ("1-D", "[]")),
        (torch.tensor([], dtype=torch.int64), ("1-D", "[0]")),
        (torch.tensor([0, T], device="meta"), ("device", "meta and cpu")),
        (torch.tensor([1, T]), ("start at 0", "got 1")),
        (torch.tensor([-1, T]), ("start at 0", "got -1")),
        (torch.tensor([0, 5]), ("end at", "6", "got 5")),
        (torch.tensor([0, 7]), ("end at", "6", "got 7")),
        (torch.tensor([0]), ("end at", "6", "got 0")),
        (torch.tensor([0, 4, 2, T]), ("never decrease", "got", "4", "2")),
    ],
    ids=str,
)
def test_bad_cu_seqlens(attend, cu_seqlens, fragments):
    refuses_packed(attend, packed(), cu_seqlens, "cu_seqlens", *fragments)


@each_packed
@pytest.mark.parametrize(
    ("bad", "fragments"),
    [
        (3, ("at least", "4", "got 3")),
        (0, ("at least", "4", "got 0")),
        (-1, ("-1",)),
        (True, ("True",)),
        (4.0, ("integer", "float")),
        ("4", ("integer", "str")),
    ],
)
def test_bad_max_seqlen(attend, bad, fragments):
    refuses_packed(attend, packed(), bounds(0, 2, T), "max_seqlen", *fragments, max_seqlen=bad)


@each_packed
@pytest.mark.parametrize("length", [4, 5, 1000])
def test_max_seqlen_does_not_change_the_result(attend, length):
    found = attend(**packed(), cu_seqlens=bounds(0, 2, T), max_seqlen=length)
    assert_close(found, attend(**packed(), cu_seqlens=bounds(0, 2, T)).double())


# 14: α and β


@each_lln
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("bad", [0.0, -1.5, NAN, INF, -INF, 0])
def test_temperature_not_positive(attend, name, bad):
    options = {"alpha": 1.0, "beta": 1.0} | {name: bad}
    refuses_dense(attend, dense(), name, "positive and finite", str(bad), **options)


@each_lln
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(("bad", "seen"), [(0.0, "0"), (-1.5, "-1.5"), (NAN, "nan"), (INF, "inf")])
def test_temperature_tensor_not_positive(attend, name, bad, seen):
    tensor = torch.ones(B, H, 1, 1)
    tensor[1, 2] = bad
    options = {"alpha": 1.0, "beta": 1.0} | {name: tensor}
    refuses_dense(attend, dense(), name, "positive and finite", f"got {seen}", **options)


@each_lln
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(
    "shape", [(B, H), (H,), (3, H, 1, 1), (B, 3, 1, 1), (B, H, T, 1), (1, B, H, 1, 1)]
)
def test_temperature_of_wrong_shape(attend, name, shape):
    options = {"alpha": 1.0, "beta": 1.0} | {name: torch.ones(shape)}
    refuses_dense(attend, dense(), name, "[B, H, 1, 1] = [2, 4, 1, 1]", str(list(shape)), **options)


@each_lln
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        ((H,), "view(4, 1, 1)"),
        ((H, 1), "view(4, 1, 1)"),
        ((B, H), "view(2, 4, 1, 1)"),
        ((B, H, 1), "view(2, 4, 1, 1)"),
    ],
)
def test_temperature_that_lacks_axes_is_told_which(attend, name, shape, fix):
    given = torch.full(shape, 1.5)
    options = {"alpha": 1.0, "beta": 1.0} | {name: given}
    refuses_dense(attend, dense(), f"give {name}.{fix}", **options)
    right = eval(f"given.{fix}", {"given": given})
    attend(**dense(), **(options | {name: right}))


def test_temperature_of_wrong_shape_beyond_repair():
    with pytest.raises(InvalidInputError) as caught:
        lln.lln_attention(**dense(), alpha=torch.ones(3), beta=1.0)
    assert "view" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "fix"),
    [((H,), "view(4, 1, 1)"), ((B, H), "view(2, 4, 1, 1)"), ((B, H, T), "view(2, 4, 6, 1)")],
)
def test_mix_that_lacks_axes_is_told_which(shape, fix):
    given = torch.full(shape, 0.5)
    refuses_dense(lln.lln_diag_attention, dense(), f"give mix.{fix}", mix=given)
    lln.lln_diag_attention(**dense(), mix=eval(f"given.{fix}", {"given": given}))


@pytest.mark.parametrize(
    ("shape", "fix"), [((H,), "view(4, 1)"), ((T,), "view(6, 1, 1)"), ((T, H), "view(6, 4, 1)")]
)
def test_mix_of_packed_sequences_that_lacks_axes_is_told_which(shape, fix):
    attend, cu_seqlens = lln.lln_diag_attention_varlen, bounds(0, 2, T)
    given = torch.full(shape, 0.5)
    refuses_packed(attend, packed(), cu_seqlens, f"give mix.{fix}", mix=given)
    attend(**packed(), cu_seqlens=cu_seqlens, mix=eval(f"given.{fix}", {"given": given}))


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(
    ("bad", "seen"), [(True, "bool"), ("2", "str"), (1j, "complex"), ([1.0], "list")]
)
def test_temperature_of_wrong_type(name, bad, seen):
    options = {"alpha": 1.0, "beta": 1.0} | {name: bad}
    refuses_dense(lln.lln_attention, dense(), name, "number or a tensor", seen, **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_temperature_of_wrong_dtype(dtype):
    bad = torch.ones(1, H, 1, 1).to(dtype)
    refuses_dense(lln.lln_attention, dense(), "alpha", str(dtype), alpha=bad, beta=1.0)


def test_temperature_on_another_device():
    bad = torch.ones(B, H, 1, 1, device="meta")
    refuses_dense(lln.lln_attention, dense(), "alpha", "meta and cpu", alpha=bad, beta=1.0)


@each_lln
@pytest.mark.parametrize(("given", "missing"), [("alpha", "beta"), ("beta", "alpha")])
def test_one_temperature_without_the_other(attend, given, missing):
    refuses_dense(attend, dense(), f"{given} was given without {missing}", **{given: 1.0})


def test_packed_temperature_of_wrong_shape():
    options = {"alpha": torch.ones(3, H, 1, 1), "beta": 1.0}
    refuses_packed(
        lln.lln_attention_varlen, packed(), bounds(0, 2, T), "alpha", "[3, 4, 1, 1]", **options
    )


def test_summary_refuses_beta_of_foreign_heads():
    tensors = dense()
    beta = torch.ones(1, 3, 1, 1)
    refuses(
        lambda: lln.KeySummary.of(tensors["key"], tensors["value"], beta), "beta", "[1, 3, 1, 1]"
    )


def test_summary_names_betas_that_differ_in_one_sentence():
    tensors = dense()
    first, second = (
        lln.KeySummary.of(tensors["key"], tensors["value"], torch.full((B, H, 1, 1), b))
        for b in (1.0, 2.0)
    )
    refuses(lambda: first.merge(second), "same beta")


def test_summary_refuses_a_foreign_query():
    tensors = dense()
    summary = lln.KeySummary.of(tensors["key"], tensors["value"], 2.0)
    refuses(lambda: summary.read(torch.randn(B, H, T, 3), 1.0), "query", "[2, 4, 6, 3]")
    refuses(lambda: summary.read(tensors["query"][:, :3], 1.0), "query", "4 heads", "got 3")
    refuses(lambda: summary.read(tensors["query"], -1.0), "alpha", "-1.0")
    refuses(lambda: summary.append(tensors["key"][:, :1], tensors["value"][:, :1]), "[2, 1, 8, 5]")


# 15 to 17: block size, dropout, scale, mix


@pytest.mark.parametrize("name", ["block", "diag"])
@pytest.mark.parametrize(
    ("bad", "fragments"),
    [
        (0, ("at least 1", "got 0")),
        (-4, ("at least 1", "got -4")),
        (2.5, ("positive integer", "float")),
        (True, ("positive integer", "bool")),
        ("4", ("positive integer", "str")),
    ],
)
def test_bad_block_size(name, bad, fragments):
    refuses_dense(DENSE[name], dense(), "block_size", *fragments, block_size=bad)


@pytest.mark.parametrize("size", [T, T + 1, 1000])
def test_block_beyond_the_sequence_is_softmax(size):
    tensors = {name: tensor.double() for name, tensor in dense().items()}
    found = lln.block_diagonal_attention(**tensors, block_size=size)
    assert_close(found, lln.reference.softmax_attention(**tensors))


@each_dense
@pytest.mark.parametrize("bad", [-0.1, 1.0, 1.5, NAN, True, "0.1", None])
def test_bad_dropout(attend, bad):
    refuses_dense(attend, dense(), "dropout_p", "[0, 1)", repr(bad), dropout_p=bad)


@pytest.mark.parametrize("name", ["block", "diag", "window"])
@pytest.mark.parametrize(
    ("bad", "seen"), [(0.0, "0.0"), (NAN, "nan"), (INF, "inf"), (True, "bool"), ("1", "str")]
)
def test_bad_scale(name, bad, seen):
    refuses_dense(DENSE[name], dense(), "scale", seen, scale=bad)


@pytest.mark.parametrize(
    ("bad", "fragments"),
    [
        (-0.1, ("[0, 1]", "-0.1")),
        (1.1, ("[0, 1]", "1.1")),
        (NAN, ("[0, 1]", "nan")),
        (True, ("[0, 1]", "True")),
        (None, ("[0, 1]", "None")),
        (torch.ones(H, dtype=torch.int64), ("floating point", "torch.int64")),
        (torch.ones(H, 1, 3), ("broadcast", "[2, 4, 6, 5]", "[4, 1, 3]")),
        (torch.ones(1, B, H, T, E), ("broadcast", "[2, 4, 6, 5]", "[1, 2, 4, 6, 5]")),
        (torch.ones(H, 1, E, device="meta"), ("device", "meta and cpu")),
    ],
    ids=str,
)
def test_bad_mix(bad, fragments):
    refuses_dense(lln.lln_diag_attention, dense(), "mix", *fragments, mix=bad)


# 18, 19 and 26: implementations and names


@each_lln
def test_triton_on_cpu_is_refused(attend):
    refuses_dense(
        attend,
        dense(),
        "impl='triton'",
        "cpu",
        "impl='eager'",
        error=BackendUnavailableError,
        impl="triton",
    )


@each_packed
def test_triton_on_cpu_is_refused_packed(attend):
    refuses_packed(
        attend, packed(), bounds(0, T), "triton", error=BackendUnavailableError, impl="triton"
    )


@pytest.mark.parametrize("width", [1, 300])
def test_auto_takes_any_head_width(width):
    tensors = dense(query=(B, H, T, width), key=(B, H, T, width))
    auto, eager = (lln.lln_attention(**tensors, impl=impl) for impl in ("auto", "eager"))
    assert torch.equal(auto, eager)
    assert auto.isfinite().all()


@each_lln
def test_unknown_impl_lists_the_known(attend):
    known = ("'auto'", "'eager'", "'triton'", "'reference'")
    refuses_dense(attend, dense(), "impl", *known, "'flash'", impl="flash")


@each_lln
def test_unknown_matching_lists_the_known(attend):
    known = ("'variance'", "'entropy'", "'paper'")
    refuses_dense(attend, dense(), "matching", *known, "'moments'", matching="moments")


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"criterion": "gauss"}, ("'variance', 'entropy', 'paper'", "'gauss'")),
        ({"scope": "batch"}, ("scope", "'head' or 'tensor'", "'batch'")),
        ({"key_mask": mask(B, 5)}, ("key_mask", "[2, 6]", "[2, 5]")),
    ],
    ids=str,
)
def test_bad_options_of_match_moments(options, fragments):
    q, k = dense()["query"], dense()["key"]
    refuses(lambda: lln.match_moments(q, k, **options), *fragments, untouched=(q, k))


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"scope": "tensor"}, ("scope", "'head' or 'batch'", "'tensor'")),
        ({"rows": 0}, ("rows", "at least 1", "got 0")),
        ({"rows": 2.5}, ("rows", "2.5")),
        ({"steps": -1}, ("steps", "at least 1", "got -1")),
        ({"scale": 0.0}, ("scale", "0.0")),
        ({"key_mask": mask(B, T, dtype=torch.uint8)}, ("key_mask", "torch.uint8")),
    ],
    ids=str,
)
def test_bad_options_of_calibrate(options, fragments):
    q, k = dense()["query"], dense()["key"]
    refuses(lambda: lln.calibrate(q, k, **options), *fragments, untouched=(q, k))


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"statistics": "batch"}, ("'sample', 'running', 'fixed', 'learned'", "'batch'")),
        ({"matching": "moments"}, ("'variance', 'entropy', 'paper'", "'moments'")),
        ({"join": "sum"}, ("'average', 'scale', 'ratio', 'gate', 'heads'", "'sum'")),
        ({"impl": "flash"}, ("'eager'", "'flash'")),
        ({"dropout": 1.0}, ("[0, 1)", "1.0")),
        ({"block_size": 0}, ("block_size", "got 0")),
        ({"lln_heads": 1}, ("lln_heads", "join='heads'", "'average'")),
        ({"join": "heads", "lln_heads": 5}, ("lln_heads", "between 0 and", "got 5")),
        ({"statistics": "running", "momentum": 0.0}, ("momentum", "(0, 1]", "got 0.0")),
        ({"statistics": "running", "momentum": "x"}, ("momentum", "(0, 1]", "got 'x'")),
        ({"momentum": 2.0}, ("momentum", "(0, 1]", "got 2.0")),
        ({"statistics": "running", "alpha": 1.0}, ("alpha", "'fixed' or 'learned'", "'running'")),
        ({"statistics": "fixed", "alpha": -1.0}, ("alpha", "positive", "-1")),
        ({"statistics": "fixed", "beta": torch.ones(3)}, ("beta", "per head (4)", "3 values")),
    ],
    ids=str,
)
def test_bad_options_of_modules(options, fragments):
    refuses(lambda: lln.LLNDiagCore(4, 8, **options), *fragments)


@pytest.mark.parametrize(("width", "heads"), [(10, 4), (0, 1), (8, 0), (-8, 2)])
def test_module_width_must_be_a_multiple_of_heads(width, heads):
    refuses(lambda: lln.LLNAttention(width, heads), "multiple of num_heads", str(width), str(heads))


@pytest.mark.parametrize("join", ["average", "scale", "ratio", "gate", "heads"])
def test_core_refuses_foreign_head_width(join):
    core = lln.LLNDiagCore(H, D, join=join)
    q, k, v = torch.randn(3, B, H, T, 6)
    refuses(lambda: core(q, k, v), "8", "6")


def test_core_refuses_foreign_value_width():
    core = lln.LLNDiagCore(H, D, join="scale")
    tensors = dense(value=(B, H, T, 1))
    refuses(lambda: core(**tensors), "value", "8", "1")


def test_core_refuses_foreign_heads():
    refuses(lambda: lln.LLNCore(3, D)(**dense()), "query", "3 heads", "got 4")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(B, T, 6), (T, 6), (8,), (), (1, B, T, 8)])
def test_module_refuses_foreign_shapes_as_they_were_given(shape, batch_first):
    layer = lln.LLNAttention(8, 2, batch_first=batch_first)
    refuses(lambda: layer(torch.randn(shape)), "query", "width 8", str(list(shape)))


@pytest.mark.parametrize("join", ["average", "scale", "ratio", "gate"])
def test_core_refuses_cross_attention_with_a_mask(join):
    tensors = dense(key=(B, H, 4, D), value=(B, H, 4, D))
    core = lln.LLNDiagCore(H, D, join=join)
    refuses(lambda: core(**tensors, key_mask=mask(B, 4)), "T = 6 and S = 4")


def test_module_names_its_own_padding_mask():
    layer = lln.LLNAttention(8, 2, batch_first=True)
    bad = torch.zeros(B, T - 1, dtype=torch.bool)
    refuses(
        lambda: layer(torch.randn(B, T, 8), key_padding_mask=bad),
        "key_padding_mask",
        "[2, 6]",
        "[2, 5]",
    )


# Legal: 9 (all False), 21, 23, 24, and values that are no reason to refuse


@each_dense
@pytest.mark.parametrize("causal", [False, True])
def test_all_false_mask_gives_zeros(attend, causal):
    options = {"is_causal": causal}
    if causal and attend not in SOFTMAX:
        options |= {"alpha": 1.5, "beta": 1.5}
    tensors = {name: tensor.requires_grad_() for name, tensor in dense().items()}
    out = attend(**tensors, key_mask=torch.zeros(B, T, dtype=torch.bool), **options)
    assert out.shape == (B, H, T, E)
    assert not out.any()
    out.sum().backward()
    assert all(not tensor.grad.any() for tensor in tensors.values())


@each_lln
@pytest.mark.parametrize("matching", ["variance", "entropy", "paper"])
def test_all_false_mask_gives_zeros_whatever_the_matching(attend, matching):
    out = attend(**dense(), key_mask=torch.zeros(B, T, dtype=torch.bool), matching=matching)
    assert not out.any()


@each_dense
@pytest.mark.parametrize("causal", [False, True])
def test_meta_device_works(attend, causal):
    options = {"is_causal": causal, "key_mask": mask(device="meta")}
    if causal and attend not in SOFTMAX:
        options |= {"alpha": torch.ones(H, 1, 1, device="meta"), "beta": 1.5}
    out = attend(**{name: tensor.to("meta") for name, tensor in dense().items()}, **options)
    assert (out.shape, out.device.type, out.dtype) == ((B, H, T, E), "meta", torch.float32)


@each_packed
def test_meta_device_works_packed(attend):
    tensors = {name: tensor.to("meta") for name, tensor in packed().items()}
    out = attend(**tensors, cu_seqlens=bounds(0, 2, T).to("meta"))
    assert (out.shape, out.device.type) == ((T, H, E), "meta")


@each_packed
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_both_integer_widths_of_cu_seqlens(attend, dtype):
    found = attend(**packed(), cu_seqlens=bounds(0, 2, 2, T, dtype=dtype))
    assert torch.equal(found, attend(**packed(), cu_seqlens=bounds(0, 2, 2, T)))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("matching", ["variance", "entropy"])
@each_name
def test_non_finite_input_shows_in_its_own_head_only(name, matching, bad):
    tensors = dense()
    tensors[name][0, 1, 3, 2] = bad
    out = lln.lln_attention(**tensors, matching=matching)
    finite = out.isfinite().flatten(2).all(-1)
    assert not finite[0, 1]
    finite[0, 1] = True
    assert finite.all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("matching", ["variance", "entropy"])
@pytest.mark.parametrize("name", ["query", "key"])
@each_lln
def test_non_finite_input_of_the_statistics_shows_in_every_row_of_its_head(
    attend, name, matching, bad
):
    """α and β are measured on it: no row may look as if they were right."""
    tensors = dense()
    tensors[name][0, 1, 3, 2] = bad
    assert not attend(**tensors, matching=matching)[0, 1].isfinite().all(-1).any()


def test_non_finite_input_of_the_authors_statistic_shows_everywhere():
    """One statistic over the whole tensor: the price of parity with their code."""
    tensors = dense()
    tensors["query"][0, 1, 3, 2] = NAN
    assert lln.lln_attention(**tensors, matching="paper").isnan().all()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("causal", [False, True])
@each_lln
def test_non_finite_query_with_given_temperatures_shows_in_its_own_row_only(attend, causal, bad):
    options = {"alpha": 1.5, "beta": 1.5, "is_causal": causal}
    tensors = dense()
    clean = attend(**tensors, **options)
    tensors["query"][0, 1, 3, 2] = bad
    out = attend(**tensors, **options)
    assert not out[0, 1, 3].isfinite().any()
    out[0, 1, 3] = clean[0, 1, 3]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["key", "value"])
@each_lln
def test_non_finite_key_or_value_stays_in_its_group_of_heads(attend, name, causal, bad):
    options = {"alpha": 1.5, "beta": 1.5, "is_causal": causal, "enable_gqa": True}
    tensors = dense(key=(B, 2, T, D), value=(B, 2, T, E))
    clean = attend(**tensors, **options)
    tensors[name][0, 1, 3, 2] = bad
    out = attend(**tensors, **options)
    # Causal attention too may show it in earlier rows.
    assert not out[0, 2:, 3:].isfinite().flatten(1).all(-1).any()
    out[0, 2:] = clean[0, 2:]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("causal", [False, True])
@each_name
def test_non_finite_input_stays_in_its_packed_sequence(name, causal):
    tensors = packed(query=(200, H, D), key=(200, H, D), value=(200, H, E))
    tensors[name][1] = NAN
    out = lln.lln_attention_varlen(
        **tensors, cu_seqlens=bounds(0, 3, 200), alpha=1.5, beta=1.5, is_causal=causal
    )
    assert out[1].isnan().any()
    assert out[3:].isfinite().all()


def test_single_element_with_the_authors_statistic():
    one = torch.ones(1, 1, 1, 1)
    assert torch.equal(lln.lln_attention(one, one, 3 * one, matching="paper"), 3 * one)


@each_packed
def test_no_tokens_at_all(attend):
    tensors = packed(query=(0, H, D), key=(0, H, D), value=(0, H, E))
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    out = attend(**tensors, cu_seqlens=bounds(0, 0))
    assert out.shape == (0, H, E)
    out.sum().backward()
    assert tensors["key"].grad.shape == (0, H, D)


def small(requires_grad=True):
    return [t.double()[:1, :1, :3, :2].requires_grad_(requires_grad) for t in dense().values()]


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: lln.lln_attention(q, k, v, alpha=1.5, beta=1.2),
        lambda q, k, v: lln.lln_attention(q, k, v, alpha=1.5, beta=1.2, is_causal=True),
        lambda q, k, v: lln.lln_diag_attention(q, k, v, alpha=1.5, beta=1.2, mix=0.3),
    ],
    ids=["lln", "causal", "diag"],
)
def test_double_backward_is_right(attend):
    inputs = small()
    assert gradcheck(attend, inputs)
    assert gradgradcheck(attend, inputs)


@each_dense
@each_name
def test_in_place_change_of_saved_tensor_is_harmless_or_detected(attend, name):
    leaves = {key: tensor.requires_grad_() for key, tensor in dense().items()}
    expected = torch.autograd.grad(attend(**leaves).sum(), leaves.values())
    tensors = {key: tensor * 1.0 for key, tensor in leaves.items()}
    out = attend(**tensors)
    tensors[name].mul_(2.0)
    found, complaint = expected, None
    try:
        found = torch.autograd.grad(out.sum(), leaves.values())
    except RuntimeError as error:
        complaint = str(error)
    assert complaint is None or "modified by an inplace operation" in complaint
    assert all(map(torch.equal, found, expected))
