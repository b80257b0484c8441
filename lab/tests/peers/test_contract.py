"""One contract, every registered name."""

import copy
import math

import pytest
import torch
from lab.tests.peers.contract import (
    HEADS,
    LEAKED_ROUNDING,
    MAX_LEN,
    SILENT_ABOVE,
    UNEVEN,
    WIDTH,
    bfloat16_budget,
    build,
    disturb,
    some_padding,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers import Core, projected
from lln_lab.peers.linear import LEAST_FLOOR
from lln_lab.peers.options import options_of

NAMES = peers.available()
CORES = [name for name in NAMES if issubclass(peers.find(name), Core)]
# Every core, and the mixers whose projections are the standard ones.
BRANCHED = [
    name for name in NAMES if name in CORES or issubclass(peers.find(name), projected.Branched)
]
every = pytest.mark.parametrize("name", NAMES)


def having(**wanted):
    """The names whose card says so."""
    found = [
        name
        for name in NAMES
        if all(getattr(peers.card(name), key) == value for key, value in wanted.items())
    ]
    return pytest.mark.parametrize("name", found)


@every
def test_the_card_is_filled_in(name):
    card = peers.card(name)
    assert card.name == name
    for field in ("title", "citation", "equation", "complexity", "oracle", "adds"):
        assert getattr(card, field).strip(), field


@every
def test_the_card_names_a_floor_far_below_the_published_one(name):
    is_least = getattr(peers.find(name), "floor", None) == LEAST_FLOOR
    assert ("clamped at 1e-24" in peers.card(name).departures) == is_least


@every
@pytest.mark.parametrize("length", [1, 2, 17, 40, MAX_LEN])
def test_shape_and_dtype(name, length):
    x = tokens(length=length)
    out = build(name)(x)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert out.isfinite().all()


@every
def test_it_mixes_tokens(name):
    layer, x = build(name), tokens()
    changed = x.clone()
    changed[:, 3] += UNEVEN
    moved = (layer(changed) - layer(x)).abs().amax((0, 2)) > 1e-9
    assert moved.sum() > 1, "a change of one token must reach another"


@every
def test_what_padded_tokens_hold_never_matters(name):
    layer, x, mask = build(name), tokens(), some_padding()
    expected = layer(x, mask)
    for garbage in (0.0, 1e4, float("inf"), float("nan")):
        found = layer(x.masked_fill(~mask.unsqueeze(-1), garbage), mask)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (expected[~mask] == 0).all()


@having(padding="longer")
def test_longer_padding_changes_no_real_token(name):
    layer, x = build(name), tokens(length=40)
    longer = torch.cat((x, tokens(length=23, seed=5)), dim=1)
    mask = torch.zeros(longer.shape[:2], dtype=torch.bool)
    mask[:, :40] = True
    alone = layer(x, mask[:, :40])
    torch.testing.assert_close(layer(longer, mask)[:, :40], alone, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(layer(x), alone, rtol=1e-9, atol=1e-10)


@every
def test_a_sequence_without_real_tokens_is_zero(name):
    layer, x, mask = build(name), tokens(), some_padding()
    mask[1] = False
    x.requires_grad_()
    out = layer(x, mask)
    assert (out[1] == 0).all()
    assert out.isfinite().all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()
    for label, parameter in layer.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), label


@every
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_empty_batch_stays_empty(name, dtype, training):
    layer = build(name, dtype=dtype).train(training)
    x = tokens(dtype=dtype)[:0].requires_grad_()
    for mask in (None, some_padding()[:0]):
        out = layer(x, mask)
        assert (out.shape, out.dtype) == (x.shape, dtype)
        out.sum().backward()
        assert x.grad.shape == x.shape
        for label, parameter in layer.named_parameters():
            assert parameter.grad is None or (parameter.grad == 0).all(), label
    for label, buffer in layer.named_buffers():
        assert buffer.isfinite().all(), label


@every
def test_samples_do_not_see_each_other(name):
    layer, x, mask = build(name), tokens(batch=3), some_padding(batch=3)
    together = layer(x, mask)
    for sample in range(3):
        alone = layer(x[sample : sample + 1], mask[sample : sample + 1])
        torch.testing.assert_close(together[sample : sample + 1], alone, rtol=1e-9, atol=1e-10)


@having(equivariant=True)
def test_permuting_tokens_permutes_outputs(name):
    layer, x, mask = build(name), tokens(), some_padding()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    found = layer(x[:, order], mask[:, order])
    torch.testing.assert_close(found, layer(x, mask)[:, order], rtol=1e-9, atol=1e-10)


@having(equivariant=False)
def test_a_claim_of_order_is_true(name):
    layer, x = build(name), tokens()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert (layer(x[:, order]) - layer(x)[:, order]).abs().max() > 1e-6


@having(causal=True)
@pytest.mark.parametrize("cut", [1, 20, 39])
def test_causal_rows_do_not_see_later_tokens(name, cut):
    layer, x = build(name, is_causal=True), tokens()
    changed = x.clone()
    changed[:, cut:] = disturb(name, x[:, cut:])
    torch.testing.assert_close(layer(changed)[:, :cut], layer(x)[:, :cut], rtol=0, atol=1e-12)
    assert (layer(changed)[:, cut:] - layer(x)[:, cut:]).abs().max() > 1e-6


@having(causal=True)
def test_a_limit_of_the_causal_form_is_true(name):
    layer, x = build(name, is_causal=True), tokens()
    changed = x.clone()
    changed[:, 20:] = tokens(length=20, seed=7)
    moved = (layer(changed)[:, :20] - layer(x)[:, :20]).abs().max() > 1e-6
    assert moved == bool(peers.card(name).causal_limit)


@having(causal=True)
def test_a_huge_later_token_leaves_no_trace_of_rounding(name):
    # In float32, and in the same chunk of a running sum as the rows that must not notice it.
    layer = build(name, is_causal=True, dtype=torch.float32)
    x = tokens(length=MAX_LEN, dtype=torch.float32)
    changed = x.clone()
    changed[:, 90:] *= 1e4
    found, expected = layer(changed)[:, :90], layer(x)[:, :90]
    atol = LEAKED_ROUNDING.get(name, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)


@having(causal=False)
def test_causal_is_refused_where_there_is_no_such_form(name):
    with pytest.raises(InvalidInputError, match="no causal form"):
        build(name, is_causal=True)


@every
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_gradients_are_finite_at_any_scale(name, scale):
    layer = build(name, dtype=torch.float32)
    x = tokens(scale=scale, dtype=torch.float32).requires_grad_()
    layer(x, some_padding()).square().mean().backward()
    assert x.grad.isfinite().all()
    is_silent = scale > SILENT_ABOVE.get(name, math.inf)
    assert (x.grad.abs().max() > 0) != is_silent
    for label, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{label} is never used"
        assert parameter.grad.isfinite().all(), label


@every
def test_bfloat16_follows_float32(name):
    exact, x, mask = build(name, dtype=torch.float32), tokens(), some_padding()
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    # The same rounded numbers on both sides: only the arithmetic differs.
    exact = copy.deepcopy(rounded).to(torch.float32)
    x = x.to(torch.bfloat16)
    out = rounded(x, mask)
    assert out.dtype == torch.bfloat16
    expected = exact(x.float(), mask)
    distance = (out.float() - expected).norm() / expected.norm()
    assert distance < bfloat16_budget(name), distance


# The advice of a processor without bfloat16 products; the numbers are the same.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@every
def test_autocast_follows_float32(name):
    layer, mask = build(name, dtype=torch.float32), some_padding()
    x = tokens(dtype=torch.float32).requires_grad_()
    expected = layer(x, mask).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, mask)
    assert out.isfinite().all()
    distance = (out.detach().float() - expected).norm() / expected.norm()
    # Not 0: autocast must have reached the projections.
    assert 0 < distance < bfloat16_budget(name), distance
    out.float().square().mean().backward()
    assert x.grad.isfinite().all()
    for label, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32, label
        assert parameter.grad.isfinite().all(), label


class OnlyOn(TorchDispatchMode):
    """Refuses operators that make a tensor anywhere else, or bring a number to the host."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            assert not isinstance(leaf, torch.Tensor) or leaf.device == self.device, func
        return out


@pytest.mark.slow
@every
def test_everything_is_made_on_the_device_of_the_input(name):
    # A meta tensor has no values: nothing can look at them to choose what to do next.
    meta = torch.device("meta")
    layer = build(name, dtype=torch.float32).to(meta)
    x = torch.empty(2, 40, WIDTH, device=meta, requires_grad=True)
    mask = torch.empty(2, 40, dtype=torch.bool, device=meta)
    with OnlyOn(meta):
        with torch.no_grad():
            for training, key_mask in ((False, None), (False, mask), (True, None)):
                assert layer.train(training)(x, key_mask).shape == x.shape
        layer(x, mask).sum().backward()
    assert x.grad.shape == x.shape


def test_what_the_device_test_refuses():
    x = torch.empty(3, device="meta")
    with OnlyOn(x.device), pytest.raises(AssertionError, match="arange"):
        x + torch.arange(1)[0]
    with OnlyOn(x.device), pytest.raises(RuntimeError, match="meta"):
        x.sum().item()


@every
def test_the_same_seed_gives_the_same_numbers(name):
    x, mask = tokens(), some_padding()
    first, second = build(name, seed=3), build(name, seed=3)
    assert torch.equal(first(x, mask), second(x, mask))
    assert torch.equal(first(x, mask), first(x, mask)), "eval mode draws nothing"
    for layer in (first.train(), second.train()):
        torch.manual_seed(4)
        layer.last = layer(x, mask)
    assert torch.equal(first.last, second.last)


@every
def test_state_dict_round_trip(name):
    x, mask = tokens(), some_padding()
    source, target = build(name, seed=3), build(name, seed=4)
    assert not torch.equal(source(x, mask), target(x, mask))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(x, mask), target(x, mask))


@every
def test_bad_input_gets_a_sentence(name):
    layer, x = build(name), tokens()
    for wrong, said in (
        (x[0], "tensor"),
        (x[..., :-1], str(WIDTH)),
        (x.long(), "floating point"),
        (x[:, :0], "at least one token"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            layer(wrong)
    with pytest.raises(InvalidInputError, match="bool"):
        layer(x, torch.ones(2, 40))
    with pytest.raises(InvalidInputError, match="shape"):
        layer(x, torch.ones(2, 39, dtype=torch.bool))
    with pytest.raises(InvalidInputError, match="device"):
        layer(x, torch.ones(2, 40, dtype=torch.bool, device="meta"))
    with pytest.raises(InvalidInputError, match="no option 'colour'"):
        build(name, colour="red")


# The advice of a processor without bfloat16 products; the numbers are the same.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@every
def test_tokens_of_another_dtype_than_the_weights_get_a_sentence(name):
    layer, x = build(name, dtype=torch.float32), tokens()
    said = r"x is torch.float64 and the weights of \w+ are torch.float32; send x.to\(torch.float32"
    with pytest.raises(InvalidInputError, match=said):
        layer(x)
    with pytest.raises(InvalidInputError, match=r"x is torch\.bfloat16"):
        layer(x.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Autocast leaves float64 alone and casts all else.
        with pytest.raises(InvalidInputError, match=r"x is torch\.float64"):
            layer(x)
        assert layer(x.bfloat16()).isfinite().all()
    layer.double()(x)


@having(needs_max_len=True)
def test_longer_than_max_len_is_refused(name):
    with pytest.raises(InvalidInputError, match="larger max_len"):
        build(name)(tokens(length=MAX_LEN + 1))


@having(needs_max_len=False)
def test_longer_than_max_len_is_fine(name):
    assert build(name)(tokens(length=MAX_LEN + 5)).isfinite().all()


def heads(length=40, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, batch, HEADS, length, WIDTH // HEADS)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 17, 40, MAX_LEN])
@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, causal) for name in CORES for causal in sorted({False, peers.card(name).causal})],
)
def test_the_fast_form_is_the_dense_form(name, length, causal):
    core = build(name, is_causal=causal).core
    query, key, value = heads(length)
    for mask in (None, some_padding(length) if length > 7 else None):
        dense = core.matrix(query, key, mask)
        found = core(query, key, value, mask)
        assert dense.shape == (2, HEADS, length, length)
        keep = slice(None) if mask is None else mask[:, None, :, None].expand_as(found)
        expected = dense @ value
        torch.testing.assert_close(found[keep], expected[keep], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", BRANCHED)
def test_rows_sum_to_one_where_the_card_says_so(name):
    mask = some_padding()
    matrix = build(name).matrix(tokens(), mask)
    if matrix.dim() == 5:
        # PolaFormer's two for the halves of the values.
        matrix = matrix.flatten(1, 2)
    rows = matrix.transpose(1, 2)[mask]
    is_stochastic = bool((rows >= 0).all()) and torch.allclose(
        rows.sum(-1), torch.ones((), dtype=rows.dtype), atol=1e-4
    )
    assert is_stochastic == peers.card(name).row_stochastic
    assert (matrix.transpose(1, 2)[1, :, :, ~mask[1]] == 0).all()


@pytest.mark.parametrize("name", BRANCHED)
def test_the_matrix_does_not_see_what_padded_tokens_hold(name):
    layer, x, mask = build(name), tokens(), some_padding()
    expected = layer.matrix(x, mask)
    for garbage in (0.0, 1e4, float("nan")):
        found = layer.matrix(x.masked_fill(~mask.unsqueeze(-1), garbage), mask)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", BRANCHED)
def test_every_linear_system_takes_the_same_branches(name):
    x, mask = tokens(), some_padding()
    plain = build(name)
    with_both = build(name, diagonal=16, convolution=5)
    added = peers.parameter_count(with_both) - peers.parameter_count(plain)
    assert added == HEADS * 5
    with_both.load_state_dict(plain.state_dict(), strict=False)
    query, key, value = plain.heads(x)
    attention = plain.attend(x, query, key, value, mask)
    blocks = torch.zeros_like(attention)
    for start in range(0, 40, 16):
        part = slice(start, start + 16)
        scores = query[..., part, :] @ key[..., part, :].mT / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(~mask[:, None, None, part], float("-inf"))
        blocks[..., part, :] = scores.softmax(-1).nan_to_num(0.0) @ value[..., part, :]
    kept = value * mask[:, None, :, None]
    padded = torch.nn.functional.pad(kept, (0, 0, 2, 2))
    weights = with_both.convolution.filter.weight[:, 0, :, 0]
    local = sum(weights[:, i, None, None] * padded[..., i : i + 40, :] for i in range(5))
    expected = plain.out((0.5 * (attention + blocks) + local).transpose(1, 2).flatten(2))
    found = with_both(x, mask)
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", BRANCHED)
def test_branches_that_do_not_fit_are_refused(name):
    for wrong, said in (
        ({"diagonal": -1}, "block_size"),
        ({"convolution": 4}, "odd"),
        ({"convolution": 2.5}, "integer"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build(name, **wrong)
    if peers.card(name).causal:
        with pytest.raises(InvalidInputError, match="later tokens"):
            build(name, convolution=5, is_causal=True)


def test_unknown_names_and_refusals():
    with pytest.raises(InvalidInputError, match="softmax"):
        peers.build("sofmax", embed_dim=8, num_heads=2, max_len=4)
    with pytest.raises(InvalidInputError, match="memory"):
        peers.build("compressive", embed_dim=8, num_heads=2, max_len=4)
    for wrong in ([], None, 3):
        with pytest.raises(InvalidInputError, match="must be a string"):
            peers.build(wrong, embed_dim=8, num_heads=2, max_len=4)
    for wrong, said in (
        ({"is_causal": "no"}, "is_causal must be True or False"),
        ({"is_causal": 1}, "is_causal must be True or False"),
        ({"num_heads": 3}, "multiple"),
        ({"embed_dim": 0}, "embed_dim"),
        ({"layer": 2, "layers": 2}, "layer"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build("elu", **wrong)


@every
def test_switches_are_true_or_false(name):
    """The word "no" would count as true."""
    for option in options_of(name):
        if isinstance(option.default, bool):
            for wrong in ("no", 1, None):
                with pytest.raises(InvalidInputError, match=f"{option.name} must be True or False"):
                    build(name, **{option.name: wrong})


@every
@pytest.mark.parametrize("masked", [False, True])
def test_any_memory_order_of_the_fused_softmax(name, masked, monkeypatch):
    """On a GPU, SDPA's output lies in memory as ``[B, N, H, D]``: no view of it may assume else."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def turned(*inputs, **options):
        out = attend(*inputs, **options)
        return out.transpose(-3, -2).contiguous().transpose(-3, -2)

    x, mask = tokens(), some_padding() if masked else None
    layer = build(name)
    expected = layer(x, mask)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", turned)
    assert torch.equal(layer(x, mask), expected)
