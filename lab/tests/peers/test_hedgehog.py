"""Hedgehog against its formula, and its distillation."""

import pytest
import torch
from lab.tests.peers.contract import HEADS, WIDTH, build, tokens

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers.hedgehog import distillation_loss

D = WIDTH // HEADS


def heads(length=20):
    return torch.randn(3, 2, HEADS, length, D, dtype=torch.float64)


def trained(**options):
    """A core whose maps are no longer the identity, nor alike."""
    core = build("hedgehog", **options).core
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return core


def features(x, weights, kind):
    """φ of one token."""
    y = weights @ x
    if kind == "fla":
        e = torch.cat((2 * y, -2 * y)).exp()
        return e / e.sum()
    up, down = y.exp(), (-y).exp()
    if kind == "exp":
        return torch.cat((up, down))
    return torch.cat((up / up.sum(), down / down.sum()))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("softmax", {}), ("exp", {"form": "exp"}), ("fla", {"compat": "fla"})],
)
def test_agrees_with_the_formula(kind, options):
    core = trained(**options)
    query, key, value = heads()
    found = core(query, key, value)
    for sample in range(2):
        for head in range(HEADS):
            maps = core.query_map[head].detach(), core.key_map[head].detach()
            phi_q = torch.stack([features(x, maps[0], kind) for x in query[sample, head]])
            phi_k = torch.stack([features(x, maps[1], kind) for x in key[sample, head]])
            weights = phi_q @ phi_k.T
            expected = weights / weights.sum(-1, keepdim=True) @ value[sample, head]
            torch.testing.assert_close(found[sample, head].detach(), expected)


def test_it_starts_at_the_identity_and_counts_its_parameters():
    layer = build("hedgehog")
    unit = torch.eye(D, dtype=torch.float64).expand(HEADS, D, D)
    for parameter in layer.core.parameters():
        assert torch.equal(parameter, unit)
    added = peers.parameter_count(layer) - peers.parameter_count(build("elu"))
    assert added == 2 * HEADS * D * D


def test_the_exponential_form_survives_any_scale_and_any_padding():
    core = build("hedgehog", form="exp", dtype=torch.float32).core
    query, key, value = (side.float() for side in heads())
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 12:] = False
    for scale in (1.0, 100.0, 1e4):
        inputs = [(scale * side).requires_grad_() for side in (query, key)]
        core(*inputs, value, mask).square().sum().backward()
        matrix = core.matrix(*inputs, mask)
        torch.testing.assert_close(matrix.sum(-1), torch.ones(2, HEADS, 20))
        assert all(side.grad.isfinite().all() for side in inputs)


def test_distillation_is_the_cross_entropy_of_real_rows():
    query, key, _ = heads(6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    student, teacher = build("hedgehog").core, build("softmax").core
    ours, theirs = student.matrix(query, key, mask), teacher.matrix(query, key, mask)
    rows = []
    for sample, real in ((0, 6), (1, 4)):
        for head in range(HEADS):
            for i in range(real):
                p, q = theirs[sample, head, i, :real], ours[sample, head, i, :real]
                rows.append(-(p * q.log()).sum())
    found = distillation_loss(ours, theirs, mask)
    torch.testing.assert_close(found, torch.stack(rows).mean())
    best = distillation_loss(theirs, theirs, mask)
    assert best < found
    with pytest.raises(InvalidInputError, match="same shape"):
        distillation_loss(ours, theirs[:, :1])


def test_distillation_teaches_the_maps_softmax():
    layer, x = build("hedgehog", dtype=torch.float32), tokens(dtype=torch.float32, scale=2.0)
    softmax = build("softmax", dtype=torch.float32)
    softmax.load_state_dict(layer.state_dict(), strict=False)
    teacher = softmax.matrix(x)
    maps = list(layer.core.parameters())
    optimiser = torch.optim.Adam(maps, lr=0.02)
    losses = []
    for _ in range(40):
        loss = distillation_loss(layer.matrix(x), teacher)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    least = distillation_loss(teacher, teacher).item()
    assert losses[-1] - least < 0.6 * (losses[0] - least)
    assert layer.core.query_map.grad.abs().max() > 0


def test_options_that_do_not_fit_are_refused():
    for options, said in (
        ({"form": "cosine"}, "form"),
        ({"compat": "other"}, "compat"),
        ({"form": "exp", "compat": "fla"}, "softmax"),
        ({"form": "exp", "is_causal": True}, "is_causal"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build("hedgehog", **options)
