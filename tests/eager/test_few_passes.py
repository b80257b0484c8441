"""LLN and LLN + Diag in few passes: the numbers and gradients of the many steps they replace."""

import pytest
import torch

import lln
from lln.eager import few_passes, products

KINDS = pytest.mark.parametrize("kind", ["lln", "lln_diag"])
SOME = torch.linspace(0.5, 1.5, 6).view(2, 3, 1, 1)
NUMBERS = {
    "numbers": (0.7, 1.3),
    "one entry": (torch.tensor(0.7), torch.full((1, 1, 1, 1), 1.3)),
    "heads": (SOME[:1], SOME[1:]),
    "samples and heads": (SOME, SOME[:, :1]),
}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """With blocks too, whatever this machine would choose."""
    monkeypatch.setattr(few_passes, "WITH_BLOCKS", True)


@pytest.fixture
def taken(monkeypatch):
    """The blocks of every call in few passes."""
    calls, own = [], few_passes.attend

    def counted(*given):
        calls.append(given[5])
        return own(*given)

    monkeypatch.setattr(few_passes, "attend", counted)
    return calls


@pytest.fixture
def by_steps(monkeypatch):
    """The same call by steps."""

    def attend(*given, **options):
        with monkeypatch.context() as without:
            without.setattr(few_passes, "suits", lambda *sides: False)
            return attention(*given, **options)

    return attend


def attention(kind, query, key, value, alpha=0.7, beta=1.3, **options):
    """A call with blocks of 8 tokens, if it has blocks."""
    options |= {"alpha": alpha, "beta": beta}
    if kind == "lln":
        return lln.lln_attention(query, key, value, **options)
    return lln.lln_diag_attention(query, key, value, block_size=8, **options)


def sides_of(tokens=24, keys=None, transposed=False):
    """Query, key and value of two samples with three heads; values are wider than keys."""
    torch.manual_seed(0)
    sizes = ((tokens, 4), (keys or tokens, 4), (keys or tokens, 5))
    sides = []
    for length, width in sizes:
        side = torch.randn(2, length, 3, width, dtype=torch.float64).transpose(1, 2)
        sides.append((side if transposed else side.contiguous()).requires_grad_())
    return sides


def same(ours, theirs, atol=1e-13):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@KINDS
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("takes_transposed", [False, True])
def test_output_and_gradients(
    kind, numbers, transposed, takes_transposed, by_steps, taken, monkeypatch
):
    monkeypatch.setattr(products, "_TAKES_TRANSPOSED", takes_transposed)
    sides = sides_of(transposed=transposed)
    found = attention(kind, *sides, *NUMBERS[numbers])
    assert [blocks is not None for blocks in taken] == [kind == "lln_diag"]
    expected = by_steps(kind, *sides, *NUMBERS[numbers])
    assert len(taken) == 1
    same([found], [expected], atol=1e-14)
    with torch.no_grad():
        same([attention(kind, *sides, *NUMBERS[numbers])], [expected], atol=1e-14)
    # As autograd gives it for a sum: one number, expanded.
    for gradient in (torch.randn_like(found), torch.ones((), dtype=found.dtype).expand_as(found)):
        ours = torch.autograd.grad(found, sides, gradient, retain_graph=True)
        same(ours, torch.autograd.grad(expected, sides, gradient, retain_graph=True))


@pytest.mark.parametrize("mix", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_mix_and_scale(mix, scale, by_steps, taken):
    sides = sides_of()
    found, expected = (
        way("lln_diag", *sides, mix=mix, scale=scale) for way in (attention, by_steps)
    )
    assert taken[0] == (8, 0.5 if scale is None else scale, mix)
    same([found], [expected], atol=1e-14)
    gradient = torch.randn_like(found)
    same(*(torch.autograd.grad(out, sides, gradient) for out in (found, expected)))


def test_other_lengths_of_keys(by_steps, taken):
    sides = sides_of(tokens=7, keys=19)
    found, expected = (way("lln", *sides) for way in (attention, by_steps))
    assert len(taken) == 1
    same([found], [expected], atol=1e-14)
    same(*(torch.autograd.grad(out.square().sum(), sides) for out in (found, expected)))


@KINDS
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_needed(kind, wanted, by_steps):
    sides = [side.detach() for side in sides_of()]
    leaves = [sides[place].requires_grad_() for place in wanted]
    outs = (way(kind, *sides).square().sum() for way in (attention, by_steps))
    same(*(torch.autograd.grad(out, leaves) for out in outs))


@KINDS
def test_second_derivatives(kind):
    sides = [side[:1, :1, :16].detach().requires_grad_() for side in sides_of()]
    torch.autograd.gradgradcheck(lambda *given: attention(kind, *given), sides)


@KINDS
def test_gradients_in_batches(kind):
    sides = sides_of()
    out = attention(kind, *sides)
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    at_once = torch.autograd.grad(out, sides, several, retain_graph=True, is_grads_batched=True)
    for place, gradient in enumerate(several):
        alone = torch.autograd.grad(out, sides, gradient, retain_graph=True)
        same((one[place] for one in at_once), alone)


@pytest.mark.parametrize("size", [1e4, 1e15])
def test_large_numbers_stay_finite(size):
    sides = [(size * side.detach()).float().requires_grad_() for side in sides_of()[:2]]
    sides.append(sides_of()[2].detach().float().requires_grad_())
    out = attention("lln_diag", *sides)
    gradients = torch.autograd.grad(out.sum(), sides)
    assert all(side.isfinite().all() for side in (out, *gradients))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lln", {"is_causal": True}),
        ("lln", {"key_mask": torch.arange(24).expand(2, -1) < 20}),
        ("lln", {"alpha": torch.full((1, 3, 1, 1), 0.7, requires_grad=True)}),
        ("lln_diag", {"beta": torch.full((1, 3, 1, 1), 1.3, requires_grad=True)}),
    ],
)
def test_other_calls_go_by_steps(kind, options, taken):
    attention(kind, *sides_of(), **options)
    assert not taken


def test_a_short_last_block_goes_by_steps_but_for_lln(taken):
    attention("lln_diag", *sides_of(tokens=21))
    assert taken == [None]


def test_a_mix_per_head_goes_by_steps_but_for_lln(taken):
    attention("lln_diag", *sides_of(), mix=torch.full((3, 1, 1), 0.5))
    assert taken == [None]


def test_without_fast_products_blocks_go_by_themselves(taken, monkeypatch):
    monkeypatch.setattr(few_passes, "WITH_BLOCKS", False)
    attention("lln_diag", *sides_of())
    assert taken == [None]


def test_grouped_heads_go_by_steps(taken):
    query, key, value = sides_of()
    lln.lln_attention(query, key[:, :1], value[:, :1], alpha=0.7, beta=1.3, enable_gqa=True)
    assert not taken


def test_whoever_traces_sees_the_steps(taken):
    sides = [side.detach() for side in sides_of()]
    _, tangent = torch.func.jvp(
        lambda *given: attention("lln_diag", *given), tuple(sides), tuple(sides)
    )
    assert tangent.isfinite().all()
    assert not taken
