"""Performer: its kernel on average, performer-pytorch, its schedule and a published bug."""

import math
from itertools import pairwise

import pytest
import torch
from lab.tests.peers.contract import HEADS, MAX_LEN, WIDTH, build, tokens

from lln.errors import InvalidInputError
from lln_lab.peers.performer import draw_projection

D = WIDTH // HEADS


def heads(length=40, batch=2, dtype=torch.float64):
    return torch.randn(3, batch, HEADS, length, D, dtype=dtype)


def dense(query, key, value, weights, *, scale=D**-0.25, epsilon=1e-4, counted=None):
    """One head with the stabilisers of the paper's code, written out."""
    query, key = query * scale, key * scale
    rows = weights.shape[0]
    top_k = max((weights @ k).max() for k in key)
    phi_q = torch.stack(
        [((weights @ q - q @ q / 2 - (weights @ q).max()).exp() + epsilon) for q in query]
    )
    phi_k = torch.stack([((weights @ k - k @ k / 2 - top_k).exp() + epsilon) for k in key])
    products = phi_q @ phi_k.T / rows
    counted = slice(None) if counted is None else counted
    return products @ value / products[:, counted].sum(-1, keepdim=True)


def test_agrees_with_the_formula():
    core = build("performer", features=40).core
    query, key, value = heads()
    found = core(query, key, value)
    for sample in range(2):
        for head in range(HEADS):
            one = (side[sample, head] for side in (query, key, value))
            torch.testing.assert_close(found[sample, head], dense(*one, core.projection))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kernel", ["exp", "relu"])
def test_agrees_with_performer_pytorch(kernel):
    performer_pytorch = pytest.importorskip("performer_pytorch")
    torch.manual_seed(1)
    theirs = performer_pytorch.FastAttention(
        D, nb_features=40, generalized_attention=kernel == "relu"
    )
    ours = build("performer", features=40, kernel=kernel, dtype=torch.float32).core
    ours.projection.copy_(theirs.projection_matrix)
    query, key, value = heads(dtype=torch.float32)
    torch.testing.assert_close(
        ours(query, key, value), theirs(query, key, value), rtol=1e-5, atol=1e-5
    )


def test_the_default_size_is_that_of_performer_pytorch():
    assert build("performer", features=None).core.projection.shape == (int(D * math.log(D)), D)


def test_rows_of_a_block_are_orthogonal():
    weights = draw_projection(40, 16).double()
    for start in (0, 16, 32):
        block = weights[start : start + 16]
        products = block @ block.T
        off = products - products.diag().diag()
        assert off.abs().max() < 1e-4
    lengths = torch.stack([draw_projection(16, 16).norm(dim=1) for _ in range(200)])
    assert lengths.square().mean().item() == pytest.approx(16, rel=0.03)
    assert lengths.std() > 0.5


def estimates(draws, features, haar):
    """Kernel estimates ``[draws]`` of one pair and its exact value."""
    generator = torch.Generator().manual_seed(5)
    # Longer vectors make the estimate heavy-tailed: its variance grows as exp(‖q + k‖²).
    query, key = 0.5 * torch.randn(2, 8, 16, generator=generator)
    query, key = (side * 16**-0.25 for side in (query, key))
    weights = draw_projection(draws * features, 16, haar=haar)
    half = (query.square().sum(-1) + key.square().sum(-1)) / 2
    sums = ((query + key) @ weights.T - half[:, None]).exp()
    return sums.unflatten(-1, (draws, features)).mean(-1), (query * key).sum(-1).exp()


def test_the_kernel_is_unbiased_and_its_error_falls_with_the_root_of_the_features():
    spread = []
    for features in (16, 256):
        found, exact = estimates(2000, features, haar=True)
        relative = found / exact[:, None] - 1
        standard_error = relative.std(-1) / 2000**0.5
        assert (relative.mean(-1).abs() < 4 * standard_error).all()
        spread.append(relative.std(-1).mean())
    assert spread[0] / spread[1] == pytest.approx(4, rel=0.25)


def test_qr_without_signs_is_biased():
    diagonals = {}
    for haar in (True, False):
        blocks = draw_projection(16 * 1000, 16, haar=haar).unflatten(0, (1000, 16))
        diagonals[haar] = blocks.mean(0).diag()
    assert diagonals[True].abs().max() < 0.2
    # √(2/πd) times the mean length of a row, for the first; less for those after it.
    assert diagonals[False][0].item() == pytest.approx(-0.79, abs=0.06)
    assert diagonals[False].mean() < -0.5
    bias = {}
    for haar in (True, False):
        found, exact = estimates(3000, 64, haar)
        bias[haar] = (found.mean(-1) / exact - 1).abs().mean()
    assert bias[True] < 0.01
    assert bias[False] > 0.015


def test_many_features_make_it_softmax():
    query, key, _ = 0.5 * heads(12)
    softmax = build("softmax").core.matrix(query, key)
    errors = [
        (build("performer", features=m, epsilon=0.0).core.matrix(query, key) - softmax).norm()
        for m in (64, 4096)
    ]
    assert errors[1] < 0.25 * errors[0]
    assert errors[1] < 0.05 * softmax.norm()


@pytest.mark.parametrize("width", [16, 256])
def test_the_causal_form_stays_in_range_for_wide_heads(width):
    layer = build(
        "performer", embed_dim=width, num_heads=1, features=64, is_causal=True, dtype=torch.float32
    )
    query, key, value = torch.randn(3, 1, 1, MAX_LEN, width)
    # The key of the largest feature there is: exp(‖w‖²/2) by itself leaves float32.
    key[0, 0, 5] = layer.core.projection[3] * width**0.25
    matrix = layer.core.matrix(query, key)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 1, MAX_LEN))
    torch.testing.assert_close(layer.core(query, key, value), matrix @ value, rtol=1e-4, atol=1e-4)


def test_the_causal_form_without_epsilon_is_the_other_forms_last_row():
    query, key, value = heads()
    options = {"features": 40, "epsilon": 0.0}
    causal, full = build("performer", is_causal=True, **options), build("performer", **options)
    causal.load_state_dict(full.state_dict())
    found, expected = causal.core(query, key, value), full.core(query, key, value)
    torch.testing.assert_close(found[..., -1, :], expected[..., -1, :])


def test_padded_keys_do_not_set_the_range():
    core = build("performer").core
    query, key, value = heads()
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[:, 30:] = False
    key[..., 30:, :] *= 100
    alone = core(query[..., :30, :], key[..., :30, :], value[..., :30, :])
    torch.testing.assert_close(core(query, key, value, mask)[..., :30, :], alone)


def test_w_is_redrawn_on_schedule_and_only_in_training():
    layer, x = build("performer", redraw_every=3).train(), tokens()
    seen = [layer.core.projection.clone()]
    for _ in range(7):
        layer(x)
        seen.append(layer.core.projection.clone())
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [False, False, False, True, False, False, True]
    layer.eval()
    layer(x)
    assert torch.equal(layer.core.projection, seen[-1])


def test_the_schedule_is_resumed():
    layer, x = build("performer", redraw_every=3).train(), tokens()
    for _ in range(2):
        layer(x)
    resumed = build("performer", seed=1, redraw_every=3).train()
    resumed.load_state_dict(layer.state_dict())
    first = resumed.core.projection.clone()
    resumed(x)
    assert torch.equal(resumed.core.projection, first)
    resumed(x)
    assert not torch.equal(resumed.core.projection, first)


def test_a_checkpointed_call_counts_once():
    # Counted twice, the second run would begin with another W than the first.
    layer, x = build("performer", redraw_every=2).train(), tokens().requires_grad_()
    layer(x)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    used = layer.core.projection.clone()
    out.sum().backward()
    assert torch.equal(layer.core.projection, used)


def test_skyformers_performer_scales_twice_and_counts_padding():
    core = build("performer", compat="skyformer", features=None).core
    assert core.projection.shape == (128, D)
    assert core.redraw_every == 0
    query, key, value = heads()
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[:, 30:] = False
    found = core(query, key, value, mask)[..., :30, :]
    zeroed = [torch.where(mask[:, None, :, None], side, 0.0) for side in (key, value)]
    for sample in range(2):
        for head in range(HEADS):
            one = [side[sample, head] for side in (query, *zeroed)]
            expected = dense(*one, core.projection, scale=D**-0.5)
            torch.testing.assert_close(found[sample, head], expected[:30])
    correct = build("performer", features=128).core
    correct.load_state_dict(core.state_dict())
    matrix = correct.matrix(query, key, mask)
    torch.testing.assert_close(matrix[..., :30].sum(-1), torch.ones_like(matrix[..., 0]))
    leak = core.matrix(query, key, mask)[..., 30:].sum(-1)
    assert leak.min() > 0.01


def test_opennlplabs_performer_has_its_offset_and_its_floor():
    core = build("performer", compat="opennlplab", features=None).core
    assert core.projection.shape == (64, D)
    query, key, value = heads()
    # So small a mass that the floor counts.
    key[..., 20:, :] *= 20
    found = core(query, key, value)
    weights, scale = core.projection.double(), D**-0.25
    low = 0
    for sample in range(2):
        for head in range(HEADS):
            q, k = (side[sample, head] * scale for side in (query, key))
            top = (k @ weights.T).max()
            along = q @ weights.T
            phi_q = (along - q.square().sum(-1, keepdim=True) / 2 - along.amax(-1, True)).exp()
            phi_k = (k @ weights.T - k.square().sum(-1, keepdim=True) / 2 - top).exp()
            products = (phi_q / 8 + 1e-4) @ (phi_k / 8 + 1e-4).T
            mass = products.sum(-1, keepdim=True)
            low += int((mass < 0.01).sum())
            expected = products @ value[sample, head] / mass.clamp_min(0.01)
            torch.testing.assert_close(found[sample, head], expected)
    assert low > 0


def test_opennlplabs_performer_trains_with_a_new_gaussian_w_a_call():
    layer, x = build("performer", compat="opennlplab").train(), tokens()
    fixed, seen = layer.core.projection.clone(), []
    for _ in range(3):
        seen.append(layer(x))
        assert not torch.equal(layer.core.gaussian, fixed)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(layer.core.projection, fixed)
    assert "core.gaussian" not in layer.state_dict()
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    torch.manual_seed(0)
    draws = [(layer.train()(x), layer.core.gaussian.clone())[1] for _ in range(50)]
    assert torch.stack(draws).std().item() == pytest.approx(1.0, rel=0.05)


def test_a_checkpointed_call_keeps_opennlplabs_draw():
    layer = build("performer", compat="opennlplab").train()
    x = tokens().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    used = layer.core.gaussian.clone()
    out.sum().backward()
    assert torch.equal(layer.core.gaussian, used)


def test_options_that_do_not_fit_are_refused():
    for options, said in (
        ({"features": 0}, "features"),
        ({"kernel": "cos"}, "kernel"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"redraw_every": -1}, "redraw_every"),
        ({"compat": "other"}, "compat"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build("performer", **options)


@pytest.mark.parametrize("options", [{"redraw_every": 1}, {"compat": "opennlplab"}])
def test_a_layer_may_be_called_twice_before_its_backward(options):
    layer = build("performer", **options).train()
    layer(tokens())  # the first call after which the next one draws
    alone = tokens(seed=2).requires_grad_()
    torch.manual_seed(7)
    layer(alone).sum().backward()
    first, second = tokens(seed=2).requires_grad_(), tokens(seed=3)
    torch.manual_seed(7)
    (layer(first).sum() + 0 * layer(second).sum()).backward()
    torch.testing.assert_close(first.grad, alone.grad, rtol=1e-9, atol=1e-12)
