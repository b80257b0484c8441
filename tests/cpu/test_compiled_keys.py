"""Exact keys by compiled passes, chosen and attended to, against the float64 reference."""

import pytest
import torch
from tests.cpu.test_compiled_passes import MASKS, sides_of
from tests.pairs import pairs

import lln
from lln import reference
from lln.checks.call import Call
from lln.errors import BackendUnavailableError
from lln.functional import ways
from lln.observers import add_observer, remove_observer
from lln.testing.tolerances import budget, largest_error

GIVEN = {"alpha": 0.8, "beta": 0.9, "offset": -1.0}
BOUNDS = torch.tensor([0, 0, 65, 66, 66, 150])


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def attention(sides, impl="cpu", **options):
    return lln.lln_keys_attention(*sides, enable_gqa=True, impl=impl, **(GIVEN | options))


def check(sides, **options):
    """Compare with the reference, which has the same keys."""
    found = attention(sides, **options)
    names = ("block_size", "group_size", "key_mask", "scale")
    where = {name: options[name] for name in names if name in options}
    if isinstance(options.get("keys", 64), int):
        number = options.get("keys", 64)
        chosen = lln.choose_keys(*sides[:2], number, enable_gqa=True, impl="cpu", **where)
        options["keys"] = chosen
    expected = attention([side.double() for side in sides], impl="reference", **options)
    plain = attention(sides, impl="eager", **options)
    assert found.isfinite().all()
    assert found.dtype == sides[0].dtype
    assert largest_error(found, expected) <= budget(found, expected, plain)


@pytest.mark.parametrize("tokens", [1, 3, 16, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("block_size", [1, 16, 24, 64, 2**40])
@pytest.mark.parametrize("keys", [0, 1, 7, 300])
def test_lengths_blocks_and_keys(tokens, block_size, keys, taken):
    check(sides_of(tokens), block_size=block_size, keys=keys)
    assert "forward_keys" in taken


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("group_size", [1, 2, 16])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_groups(block_size, group_size, mask, taken):
    options = {"block_size": block_size, "group_size": group_size, "keys": 9}
    check(sides_of(150), key_mask=MASKS[mask] if mask else None, **options)
    assert taken == ["forward_keys", "choose"]


@pairs(mask=MASKS, block_size=[3, 16, 64, 160, 2**40], keys=[0, 8, 150], transposed=[False, True])
def test_masks(mask, block_size, keys, transposed, taken):
    sides = sides_of(150, transposed=transposed)
    check(sides, block_size=block_size, keys=keys, key_mask=MASKS[mask])
    assert "forward_keys" in taken


@pytest.mark.parametrize(
    ("width", "values"),
    [(16, 16), (64, 16), (80, 80), (128, 128), (1, 1), (20, 36), (256, 256), (24, 40)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_widths(width, values, transposed, taken):
    check(sides_of(width=width, values=values, transposed=transposed), block_size=16, keys=10)
    assert taken == ["forward_keys", "choose"]


@pytest.mark.parametrize("key_heads", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 0.3, -0.2])
def test_grouped_queries_and_scale(key_heads, scale, taken):
    sides = sides_of(150, heads=6, key_heads=key_heads)
    check(sides, block_size=16, keys=11, scale=scale, key_mask=MASKS["left"])
    assert taken == ["forward_keys", "choose"]


@pytest.mark.parametrize("heads", [1, 3, 6])
@pytest.mark.parametrize("samples", [1, 2])
def test_numbers_of_heads(heads, samples, taken):
    numbers = torch.linspace(0.5, 1.1, heads * samples).view(samples, heads, 1, 1)
    sides = sides_of(100, heads=6 if heads == 6 else 3, key_heads=3)
    given = {"alpha": numbers, "beta": numbers[:, :3], "offset": -numbers}
    check(sides, block_size=16, keys=11, **given)
    assert "forward_keys" in taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, "some"])
def test_half_types_are_summed_in_float32(dtype, mask, taken):
    sides = [side.to(dtype) for side in sides_of(150)]
    check(sides, block_size=16, keys=11, key_mask=MASKS[mask] if mask else None)
    assert "forward_keys" in taken


@pairs(
    tokens=[40, 150, 700, 3000],
    keys=[1, 8, 64],
    group_size=[4, 16],
    kind=["normal", "few values", "alike", "one channel", "half"],
)
def test_the_choice_is_that_of_plain_pytorch(tokens, keys, group_size, kind, taken):
    """Whole numbers have exact scores; of equal ones the first positions win."""
    query, key, _ = sides_of(tokens, width=16)
    if kind == "few values":
        query, key = query.round(), key.round()
    elif kind == "alike":
        key = key[:, :, :1].expand_as(key)
    elif kind == "one channel":
        key = key.round() * (torch.arange(16) == 3)
    elif kind == "half":
        query, key = (query * 4).round().to(torch.bfloat16), (key * 4).round().to(torch.bfloat16)
    options = {"block_size": 16, "group_size": group_size, "keys": keys}
    for mask in (None, torch.rand(2, tokens) < 0.7):
        found = lln.choose_keys(query, key, impl="cpu", key_mask=mask, **options)
        expected = lln.choose_keys(query, key, impl="eager", key_mask=mask, **options)
        assert torch.equal(found, expected)
    assert taken == ["choose"] * 2


@pytest.mark.parametrize("size", [1e-30, 1e4, 1e15])
def test_scores_of_any_size_are_ranked(size, taken):
    query, key, _ = sides_of(400)
    found = lln.choose_keys(query, size * key, 20, impl="cpu")
    assert torch.equal(found, lln.choose_keys(query, key, 20, impl="cpu"))
    assert taken == ["choose"] * 2


def test_indices_of_a_caller_are_taken(taken):
    sides = sides_of(150)
    indices = torch.randint(-1, 150, (2, 3, 11, 9))
    check(sides, block_size=16, keys=indices, key_mask=MASKS["some"])
    indices[:] = -1
    none = attention(sides, block_size=16, keys=indices, key_mask=MASKS["some"])
    assert torch.equal(none, attention(sides, block_size=16, keys=0, key_mask=MASKS["some"]))
    assert "choose" not in taken


def test_all_keys_exact_is_softmax(taken):
    sides = sides_of(100)
    found = attention(sides, keys=100, block_size=16)
    expected = reference.softmax_attention(*(side.double() for side in sides))
    assert largest_error(found, expected) <= budget(found, expected)
    assert taken == ["forward_keys"]


def test_without_slots(taken):
    check(sides_of(150), offset=-1e30, keys=12, block_size=16)
    assert "forward_keys" in taken


def test_a_vector_added_to_all_keys_changes_nothing(taken):
    query, key, value = sides_of(150)
    options = {"keys": 12, "block_size": 16}
    found = attention((query, key + 30 * torch.randn(32), value), **options)
    torch.testing.assert_close(found, attention((query, key, value), **options), atol=1e-3, rtol=0)
    assert taken == ["forward_keys"] * 2


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_what_is_missing_is_matched(kind, taken):
    sides = sides_of(150)
    if kind == "dense":
        found, wide = sides, [side.double() for side in sides]
        options = {"alpha": None, "beta": None, "offset": None, "keys": 9, "block_size": 16}
        results = [attention(found, **options), attention(wide, "eager", **options)]
    else:
        rows = [side[0].transpose(0, 1) for side in sides]
        wide = [side.double() for side in rows]
        options = {"keys": 9, "block_size": 16}
        results = [lln.lln_keys_attention_varlen(*rows, BOUNDS, impl="cpu", **options)]
        results.append(lln.lln_keys_attention_varlen(*wide, BOUNDS, impl="eager", **options))
    torch.testing.assert_close(results[0].double(), results[1], atol=1e-5, rtol=1e-5)
    assert "forward_keys" in taken


@pytest.mark.parametrize("group_size", [None, 4])
def test_packed_sequences(group_size, taken):
    sides = [side[0].transpose(0, 1) for side in sides_of(150)]
    options = {"keys": 9, "block_size": 16, "group_size": group_size}
    offset = torch.linspace(-2, 1, 15).view(5, 3, 1, 1)
    numbers = GIVEN | {"offset": offset, "alpha": 1 + offset.abs()}
    found = lln.lln_keys_attention_varlen(*sides, BOUNDS, impl="cpu", **numbers, **options)
    wide = [side.double() for side in sides]
    expected = lln.lln_keys_attention_varlen(*wide, BOUNDS, impl="reference", **numbers, **options)
    assert largest_error(found, expected) <= budget(found, expected)
    assert taken == ["forward_keys"] * 3
    nothing = [side[:0] for side in sides]
    bounds = torch.tensor([0, 0])
    empty = lln.lln_keys_attention_varlen(*nothing, bounds, impl="cpu", **GIVEN, **options)
    assert empty.shape == (0, 3, 48)


def test_empty_tensors(taken):
    sides = sides_of(16)
    assert attention([side[:0] for side in sides]).shape == (0, 3, 16, 48)
    assert attention([side[:, :, :0] for side in sides]).shape == (2, 3, 0, 48)
    assert not taken


def test_a_sample_without_keys_is_zero(taken):
    mask = MASKS["some"].clone()
    mask[1] = False
    query, key, value = sides_of(150)
    options = {"keys": 9, "block_size": 16, "key_mask": mask}
    found = attention((query, key, value), **options)
    assert found[0].all(-1).any()
    assert not found[1].any()
    assert (lln.choose_keys(query, key, 9, block_size=16, key_mask=mask)[1] == -1).all()
    assert taken == ["forward_keys", "choose"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_masked_is_not_seen(bad, taken):
    mask = MASKS["some"]
    clean = sides_of(150)
    sides = [side.clone() for side in clean]
    for side in sides[1:]:
        side[~mask[:, None].expand(side.shape[:3])] = bad
    options = {"keys": 9, "block_size": 16, "key_mask": mask}
    assert torch.equal(attention(sides, **options), attention(clean, **options))
    sides[0][~mask[:, None].expand(sides[0].shape[:3])] = bad
    found, expected = attention(sides, **options), attention(clean, **options)
    assert torch.equal(found.mT[..., mask[0]][0], expected.mT[..., mask[0]][0])
    assert taken == ["forward_keys"] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_a_number_shows_where_it_is_seen(bad, place, taken):
    sides = [side.clone() for side in sides_of(150)]
    sides[place][1, 2, 100, 3] = bad
    found = attention(sides, keys=9, block_size=16)
    expected = attention(sides, "eager", keys=9, block_size=16)
    # An infinite value may be NaN here and infinite there; keys and values are seen by all rows.
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not found[1, 2, 100].isfinite().all()
    assert found[0].isfinite().all()
    assert taken == ["forward_keys"]


def test_the_number_of_threads_changes_nothing(taken):
    sides, threads, found = sides_of(1000), torch.get_num_threads(), []
    mask = torch.arange(1000) < torch.tensor([[0], [700]])
    try:
        # The last ones cut heads.
        for number in (1, 2, 13, 40):
            torch.set_num_threads(number)
            options = {"keys": 20, "block_size": 32, "group_size": 16}
            found.append(attention(sides, "auto", **options))
            found.append(attention(sides, "auto", key_mask=mask, **options))
    finally:
        torch.set_num_threads(threads)
    for place, other in enumerate(found):
        assert torch.equal(found[place % 2], other)
    assert taken == ["forward_keys"] * 8


def test_the_output_lies_in_memory_as_the_query_does(taken):
    for transposed in (False, True):
        sides = sides_of(80, values=32, transposed=transposed)
        found = attention(sides, keys=5, block_size=16)
        assert found.stride() == sides[0].stride()
    assert taken == ["forward_keys"] * 2


@pytest.mark.parametrize("is_packed", [False, True])
def test_who_listens_hears_what_is_computed(is_packed, taken):
    sides, heard = sides_of(150), []
    options = {"keys": 9, "block_size": 16}
    add_observer(heard.append)
    try:
        if is_packed:
            rows = [side[0].transpose(0, 1) for side in sides]
            found = lln.lln_keys_attention_varlen(*rows, BOUNDS, impl="cpu", **GIVEN, **options)
        else:
            found = attention(sides, **options)
    finally:
        remove_observer(heard.append)
    assert "forward_keys" in taken
    (said,) = heard
    options["keys"] = said.keys
    if is_packed:
        again = lln.lln_keys_attention_varlen(*rows, BOUNDS, impl="eager", **GIVEN, **options)
    else:
        again = attention(sides, "eager", **options)
    torch.testing.assert_close(found, again, atol=1e-5, rtol=1e-5)


def test_what_it_does_not_compute_is_refused_with_its_reason(taken):
    rows = [side[0].transpose(0, 1) for side in sides_of(150)]
    indices = torch.zeros(3, 14, 2, dtype=torch.int64)
    packed = {"keys": indices, "block_size": 16, "impl": "cpu"}
    with pytest.raises(BackendUnavailableError, match="takes no indices of keys in packed"):
        lln.lln_keys_attention_varlen(*rows, BOUNDS, **GIVEN, **packed)
    assert not taken


def test_a_prepared_call_says_what_pytorch_computes(taken):
    call = Call("lln_keys", *sides_of(40), block_size=16, keys=4, group_size=16)
    said = "Compiled passes compute the call, and plain PyTorch α and β and the offset."
    assert str(ways.prepare(call, "cpu")) == said
    call = call.replace(**GIVEN)
    assert str(ways.prepare(call, "cpu")) == "Compiled passes compute the call."
    assert not taken
