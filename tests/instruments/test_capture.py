"""capture: bit-equal outputs, the right numbers, everything put back."""

import json
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lln import (
    LLNAttention,
    LLNDiagAttention,
    LLNDiagCore,
    WindowAttention,
    lln_attention,
    lln_attention_varlen,
    window_attention_varlen,
)
from lln.errors import InvalidInputError
from lln.instruments import entropy, temperature
from lln.instruments.capture import capture

WATCHED = (
    (F, "scaled_dot_product_attention"),
    (F, "multi_head_attention_forward"),
    (torch, "_native_multi_head_attention"),
    (torch, "_transformer_encoder_layer_fwd"),
)


@pytest.fixture(autouse=True)
def _everything_is_put_back():
    """No test may leave a patch, a hook or an observer behind."""
    from torch.nn.modules import module as hooks

    from lln import observers

    before = [getattr(owner, name) for owner, name in WATCHED]
    yield
    assert [getattr(owner, name) for owner, name in WATCHED] == before
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    assert not observers._observers


def dense_entropy(weights):
    """Eq. (7) of ``[..., T, S]``, by NumPy-like float64 arithmetic."""
    weights = weights.double()
    return -(weights * weights.clamp_min(1e-300).log2()).sum(-1).mean(-1)


def dense_gap(weights):
    values = torch.linalg.eigvals(weights.double()).abs().sort(-1, descending=True).values
    return 1 - values[..., 1]


class Attention(nn.Module):
    """One layer that calls ``scaled_dot_product_attention`` in the way it is told."""

    def __init__(self, width=16, heads=2, attend=None, **options):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.heads, self.attend, self.options = heads, attend, options

    def split(self, hidden):
        parts = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
        return parts.permute(2, 0, 3, 1, 4).unbind()

    def forward(self, hidden):
        attend = self.attend or F.scaled_dot_product_attention
        out = attend(*self.split(hidden), **self.options)
        return out.transpose(1, 2).flatten(2)

    def weights(self, hidden):
        """P in float64, from the definition."""
        query, key, _ = (side.double() for side in self.split(hidden))
        scale = self.options.get("scale") or query.shape[-1] ** -0.5
        scores = scale * query @ key.mT
        if self.options.get("is_causal"):
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        mask = self.options.get("attn_mask")
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, -torch.inf)
                if mask.dtype is torch.bool
                else (scores + mask)
            )
        return scores.softmax(-1)


class ImportedByName(Attention):
    def forward(self, hidden):
        return scaled_dot_product_attention(*self.split(hidden)).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden):
        for layer in self.layers:
            out = layer(hidden)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return hidden


def values(seen, name, layer=None):
    """``[calls·B, H]`` of one layer."""
    calls = [call for call in seen.calls if layer is None or call.layer == layer]
    return torch.cat([call.values[name] for call in calls])


KEY_MASK = torch.ones(2, 1, 1, 9, dtype=torch.bool)
KEY_MASK[1, ..., 6:] = False


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.7},
        {"is_causal": True},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()},
        {"attn_mask": torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1) > 0, -torch.inf)},
        {"attn_mask": torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1) > 0, -1e4)},
    ],
    ids=["plain", "scale", "causal", "causal mask", "additive causal mask", "minus 10000"],
)
def test_sdpa_is_measured_exactly_and_passes_unchanged(options):
    model = Stack(Attention(**options), Attention(**options))
    x = 2 * torch.randn(2, 9, 16)
    before = model(x)
    with capture(model) as seen:
        after = model(x)
    assert torch.equal(before, after)
    assert seen.layers == ["layers.0", "layers.1"]
    weights = model.layers[0].weights(x)
    found = values(seen, "entropy", "layers.0")
    torch.testing.assert_close(found, dense_entropy(weights), rtol=0, atol=1e-5)
    found = values(seen, "spectral_gap", "layers.0")
    torch.testing.assert_close(found, dense_gap(weights), rtol=0, atol=1e-5)


WINDOW = (torch.arange(9)[:, None] - torch.arange(9)).abs() <= 2
BIAS = -0.3 * (torch.arange(9)[:, None] - torch.arange(9)).abs().float()
BY_HEAD = torch.stack([WINDOW, torch.ones(9, 9, dtype=torch.bool)])


@pytest.mark.parametrize("mask", [WINDOW, BIAS, BY_HEAD], ids=["window", "bias", "by head"])
def test_masks_over_pairs_are_measured_from_the_matrix(mask):
    layer = Attention(attn_mask=mask)
    x = 2 * torch.randn(2, 9, 16)
    before = layer(x)
    with capture(layer, instruments=("temperature", "entropy", "spectral_gap", "variance")) as seen:
        after = layer(x)
    assert torch.equal(before, after)
    assert not seen.problems
    weights = layer.weights(x)
    for name, dense in (("entropy", dense_entropy), ("spectral_gap", dense_gap)):
        torch.testing.assert_close(values(seen, name), dense(weights), rtol=0, atol=1e-6)
    expected = weights.var((-2, -1), correction=0)
    torch.testing.assert_close(values(seen, "variance"), expected, rtol=1e-5, atol=0)


def test_mask_over_pairs_with_padding():
    mask = WINDOW & KEY_MASK & KEY_MASK.mT
    layer = Attention(attn_mask=mask)
    x = torch.randn(2, 9, 16)
    with capture(layer) as seen:
        layer(x)
    weights = layer.weights(x)
    expected = torch.stack([dense_entropy(weights[0]), dense_entropy(weights[1, :, :6])])
    torch.testing.assert_close(values(seen, "entropy"), expected, rtol=0, atol=1e-6)


def test_causal_cross_attention():
    class Cross(nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key, is_causal=True)

    query, key, model = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), Cross()
    with capture(model) as seen:
        model(query, key)
    scores = query.double() @ key.double().mT / 8**0.5
    scores = scores.masked_fill(torch.ones(4, 6).triu(1) > 0, -torch.inf)
    expected = dense_entropy(scores.softmax(-1))
    torch.testing.assert_close(values(seen, "entropy"), expected, rtol=0, atol=1e-6)
    assert "spectral_gap" not in seen.records[0].values


def test_a_matrix_too_large_to_form_is_reported(monkeypatch):
    from lln.instruments import observed_call

    monkeypatch.setattr(observed_call, "_LARGEST_MATRIX", 80)
    layer = Attention(attn_mask=WINDOW)
    with capture(layer) as seen:
        layer(torch.randn(1, 9, 16))
    assert "9×9 matrix" in seen.problems[""]


def test_padding_is_left_out():
    layer = Attention(attn_mask=KEY_MASK)
    x = torch.randn(2, 9, 16)
    with capture(layer) as seen:
        layer(x)
    weights = layer.weights(x)
    expected = torch.stack([dense_entropy(weights[0]), dense_entropy(weights[1, :, :6])])
    torch.testing.assert_close(values(seen, "entropy"), expected, rtol=0, atol=1e-5)
    gap = torch.stack([dense_gap(weights[0]), dense_gap(weights[1, :, :6, :6])])
    torch.testing.assert_close(values(seen, "spectral_gap"), gap, rtol=0, atol=1e-5)


def test_masked_nan_has_no_effect():
    layer = Attention(attn_mask=KEY_MASK)
    x = torch.randn(2, 9, 16)
    with capture(layer) as clean:
        layer(x)
    x[1, 6:] = torch.nan
    with capture(layer) as seen:
        layer(x)
    assert not seen.problems
    assert torch.equal(values(seen, "entropy"), values(clean, "entropy"))


def test_grouped_queries():
    class Grouped(nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    model = Grouped()
    with capture(model) as seen:
        model(query, key)
    weights = (query.double() @ key.double().repeat_interleave(2, 1).mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(values(seen, "entropy"), dense_entropy(weights), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 3, 2, 7, 8)], ids=["2-D", "3-D", "5-D"])
def test_any_number_of_leading_axes(shape):
    class Plain(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    x, model = torch.randn(shape), Plain()
    with capture(model) as seen:
        model(x)
    expected = dense_entropy((x.double() @ x.double().mT / 8**0.5).softmax(-1))
    found = values(seen, "entropy").flatten()
    torch.testing.assert_close(found, expected.flatten(), rtol=0, atol=1e-6)


def test_a_name_imported_or_held_as_attribute_is_seen_and_put_back():
    by_name, held = ImportedByName(), Attention(attend=F.scaled_dot_product_attention)
    model = Stack(by_name, held)
    x = torch.randn(1, 5, 16)
    before = model(x)
    with capture(model) as seen, capture(by_name) as inner:
        after = model(x)
    assert torch.equal(before, after)
    assert seen.layers == ["layers.0", "layers.1"]
    assert inner.layers == [""]
    assert held.attend is F.scaled_dot_product_attention
    assert globals()["scaled_dot_product_attention"] is F.scaled_dot_product_attention


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("fast", [True, False], ids=["fast path", "slow path"])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
def test_multihead_attention(need_weights, fast, mask):
    layer = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = 3 * torch.randn(2, 9, 16)
    options = {}
    if mask in ("padding", "both"):
        options["key_padding_mask"] = ~KEY_MASK[:, 0, 0]
    if mask in ("causal", "both"):
        options["attn_mask"] = torch.ones(9, 9, dtype=torch.bool).triu(1)
    options["need_weights"] = need_weights
    with torch.set_grad_enabled(not fast):
        before = layer(x, x, x, **options)[0]
        weights = layer(x, x, x, **options | {"need_weights": True}, average_attn_weights=False)[1]
        with capture(layer) as seen:
            after = layer(x, x, x, **options)[0]
    assert torch.equal(before, after)
    assert len(seen.calls) == 1
    rows = weights.double()
    if mask in ("padding", "both"):
        expected = torch.stack([dense_entropy(rows[0]), dense_entropy(rows[1, :, :6])])
    else:
        expected = dense_entropy(rows)
    torch.testing.assert_close(values(seen, "entropy"), expected, rtol=0, atol=1e-5)


def test_multihead_attention_with_extra_keys():
    layer = nn.MultiheadAttention(16, 2, add_bias_kv=True, add_zero_attn=True, kdim=8, vdim=8)
    query, key = torch.randn(5, 2, 16), torch.randn(7, 2, 8)
    out, weights = layer(query, key, key, average_attn_weights=False)
    with capture(layer, instruments=("entropy",)) as seen:
        again, _ = layer(query, key, key)
    assert torch.equal(out, again)
    assert (seen.calls[0].queries, seen.calls[0].keys) == (5, 9)
    torch.testing.assert_close(values(seen, "entropy"), dense_entropy(weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["fast", "grad", "train"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_transformer_encoder(norm_first, padded, mode, monkeypatch):
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2).train(mode == "train")
    x = torch.randn(2, 9, 16)
    padding = ~KEY_MASK[:, 0, 0] if padded else None

    def run():
        torch.manual_seed(5)
        with torch.set_grad_enabled(mode != "fast"):
            return model(x, src_key_padding_mask=padding)

    before = run()
    fast = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: fast.append(1) or original(*a)
    )
    with capture(model) as seen:
        after = run()
    monkeypatch.undo()
    assert bool(fast) == (mode == "fast")
    assert torch.equal(before, after)
    assert seen.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad():
        hidden = model.layers[0].norm1(x) if norm_first else x
        attention = nn.MultiheadAttention(16, 2, batch_first=True)
        attention.load_state_dict(model.layers[0].self_attn.state_dict())
        mask = padding
        _, weights = attention(
            hidden, hidden, hidden, key_padding_mask=mask, average_attn_weights=False
        )
    rows = [weights[0], weights[1, :, :6] if padded else weights[1]]
    expected = torch.stack([dense_entropy(part) for part in rows])
    found = values(seen, "entropy", "layers.0.self_attn")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("statistics", ["sample", "running", "fixed", "learned"])
def test_lln_module_with_its_temperatures(statistics):
    options = {"alpha": 1.7, "beta": 2.1} if statistics in ("fixed", "learned") else {}
    layer = LLNAttention(16, 2, batch_first=True, statistics=statistics, **options).eval()
    x = torch.randn(2, 9, 16)
    before = layer(x)[0]
    with capture(layer) as seen:
        after = layer(x)[0]
    assert torch.equal(before, after)
    (call,) = seen.calls
    assert (call.layer, call.kind) == ("core", "lln")
    heads = [
        part.unflatten(-1, (2, -1)).transpose(1, 2)
        for part in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    ]
    alpha, beta = layer.core.statistics(heads[0], heads[1])
    expected = entropy(heads[0], heads[1], kind="lln", alpha=alpha, beta=beta)
    torch.testing.assert_close(call.values["entropy"], expected)
    torch.testing.assert_close(call.values["alpha"], alpha[..., 0, 0].double().expand(2, 2))
    torch.testing.assert_close(call.values["beta"], beta[..., 0, 0].double().expand(2, 2))


@pytest.mark.parametrize("join", ["average", "scale", "ratio", "gate", "heads"])
def test_lln_diag_module(join):
    layer = LLNDiagAttention(16, 4, batch_first=True, join=join, block_size=3)
    x = torch.randn(2, 9, 16)
    before = layer(x)[0]
    with capture(layer) as seen:
        after = layer(x)[0]
    assert torch.equal(before, after)
    kinds = {call.kind: call for call in seen.calls}
    if join == "scale":
        assert seen.layers == ["core (lln)", "core (diag)"]
        assert list(seen.medians("alpha")["core (lln)"]) == [0, 1, 2, 3]
        assert seen.medians("alpha")["core (diag)"] == {}
    elif join == "heads":
        assert sorted({(r.kind, r.head) for r in seen.records}) == [
            ("diag", 2),
            ("diag", 3),
            ("lln", 0),
            ("lln", 1),
        ]
    else:
        assert list(kinds) == ["lln_diag"]
    if join == "ratio":
        assert "channel" in seen.problems["core"]
    else:
        assert not seen.problems
        assert all(math.isfinite(record.values["entropy"]) for record in seen.records)


def test_window_module():
    layer = WindowAttention(16, 4, batch_first=True, window=2, scale=0.4)
    x, mask = torch.randn(2, 9, 16), torch.arange(9) < torch.tensor([[9], [6]])
    with capture(layer, instruments=("entropy", "temperature")) as seen:
        layer(x, key_padding_mask=~mask)
        layer(x, is_causal=True)
    assert [(call.layer, call.kind) for call in seen.calls] == [("core", "window")] * 2
    assert not seen.problems
    heads = [
        part.unflatten(-1, (4, -1)).transpose(1, 2)
        for part in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    ]
    options = {"kind": "window", "window": 2, "scale": 0.4}
    for call, how in zip(seen.calls, ({"key_mask": mask}, {"is_causal": True}), strict=True):
        for name, measure in (("entropy", entropy), ("temperature", temperature)):
            expected = measure(*heads[:2], **options, **how)
            torch.testing.assert_close(call.values[name], expected)


def test_packed_windows():
    class Packed(nn.Module):
        def forward(self, x, bounds):
            return window_attention_varlen(x, x, x, bounds, window=3)

    x, bounds, model = torch.randn(10, 2, 8), torch.tensor([0, 3, 3, 10]), Packed()
    with capture(model, instruments=("entropy",)) as seen:
        model(x, bounds)
    (call,) = seen.calls
    expected = entropy(x, x, kind="window", window=3, cu_seqlens=bounds)
    torch.testing.assert_close(call.values["entropy"], expected, equal_nan=True)


def test_packed_sequences():
    class Packed(nn.Module):
        def forward(self, x, bounds):
            return lln_attention_varlen(x, x, x, bounds)

    x, bounds, model = torch.randn(10, 2, 8), torch.tensor([0, 3, 10]), Packed()
    with capture(model, instruments=("entropy",)) as seen:
        model(x, bounds)
    expected = torch.cat(
        [
            entropy(part.transpose(0, 1)[None], part.transpose(0, 1)[None], kind="lln")
            for part in (x[:3], x[3:])
        ]
    )
    torch.testing.assert_close(values(seen, "entropy"), expected)


def test_training_step_is_bit_equal_with_dropout():
    def train(watch):
        torch.manual_seed(3)
        layers = [Attention(dropout_p=0.2), LLNAttention(16, 2, dropout=0.2, batch_first=True)]
        model = Stack(*layers, LLNDiagCoreLayer())
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            x = torch.randn(2, 9, 16)
            if watch:
                with capture(model):
                    loss = model(x).square().mean()
            else:
                loss = model(x).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    (losses, weights), (watched_losses, watched_weights) = train(False), train(True)
    assert losses == watched_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))


class LLNDiagCoreLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.core = LLNDiagCore(2, 8, statistics="running", block_size=4, dropout=0.1)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.core(*parts).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = Stack(Attention(), LLNDiagCoreLayer()).eval()
    x = torch.randn(2, 9, 16)
    with torch.autocast("cpu", dtype):
        before = model(x)
        with capture(model) as seen:
            after = model(x)
    assert torch.equal(before, after)
    assert not seen.problems
    exact = dense_entropy(model.layers[0].weights(x))
    assert values(seen, "entropy", "layers.0").sub(exact).abs().max() < 0.02


def test_inference_mode():
    model = Stack(Attention(), LLNDiagCoreLayer()).eval()
    with torch.inference_mode(), capture(model) as seen:
        model(torch.randn(2, 9, 16))
    assert not seen.problems
    assert len(seen.records) == 8


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_forward_is_measured_once(use_reentrant):
    model = Stack(Attention(), LLNAttention(16, 2, batch_first=True))
    x = torch.randn(1, 6, 16, requires_grad=True)
    with capture(model) as seen:
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert [(call.layer, call.call) for call in seen.calls] == [
        ("layers.0", 0),
        ("layers.1.core", 0),
    ]


def test_nan_in_one_layer_is_reported_and_the_rest_measured():
    model = Stack(Attention(), Attention(), Attention())
    with torch.no_grad():
        # The last layer computes NaN; what comes after it in the stack is nothing.
        model.layers[2].qkv.weight[0, 0] = torch.nan
    with capture(model) as seen:
        model(torch.randn(2, 9, 16))
    assert seen.problems == {
        "layers.2": "not measured: queries hold NaN or infinity in 2 of 4 heads"
    }
    heads = seen.medians("entropy")
    assert math.isnan(heads["layers.2"][0])
    assert all(math.isfinite(heads[layer][h]) for layer in ("layers.0", "layers.1") for h in (0, 1))
    assert math.isfinite(heads["layers.2"][1])
    assert json.loads(seen.to_json())["problems"] == seen.problems
    assert "layers.2: not measured" in seen.table()


def test_an_instrument_that_raises_does_not_end_the_run(monkeypatch):
    from lln.instruments import observed_call

    def broken(*_, **__):
        raise RuntimeError("out of something\nand more lines")

    monkeypatch.setitem(observed_call.INSTRUMENTS, "entropy", broken)
    model = Stack(Attention())
    with capture(model) as seen:
        model(torch.randn(1, 4, 16))
    assert seen.problems == {"layers.0": "not measured: out of something"}
    # The others are measured all the same.
    assert sorted(seen.records[0].values) == ["spectral_gap", "temperature"]


def test_one_token():
    model = Stack(Attention(), LLNAttention(16, 2, batch_first=True))
    with capture(model) as seen:
        model(torch.randn(1, 1, 16))
    assert set(values(seen, "entropy").flatten().tolist()) == {0.0}


def test_cross_attention_has_no_gap():
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    query, key = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    with capture(layer) as seen:
        layer(query, key, key, need_weights=False)
    assert sorted(seen.records[0].values) == ["entropy", "temperature"]


def test_calls_are_counted_limited_and_announced():
    model, heard = Stack(Attention(), Attention()), []
    with capture(model, instruments=("entropy",), max_calls=2, on_call=heard.append) as seen:
        for _ in range(3):
            model(torch.randn(1, 5, 16))
    assert [(call.layer, call.call) for call in seen.calls] == [
        ("layers.0", 0),
        ("layers.1", 0),
        ("layers.0", 1),
        ("layers.1", 1),
    ]
    assert [(call.layer, call.call) for call in heard] == [
        (call.layer, call.call) for call in seen.calls
    ]
    assert heard[0].query.shape == (1, 2, 5, 8)
    assert not heard[0].query.requires_grad
    assert torch.equal(heard[0].values["entropy"], seen.calls[0].values["entropy"])


def test_every_instrument_and_the_views_of_the_results(tmp_path):
    model = Stack(Attention(), LLNDiagCoreLayer()).eval()
    names = ("temperature", "entropy", "spectral_gap", "variance", "log_normality")
    with capture(model, instruments=(*names, "score_variance")) as seen:
        model(torch.randn(2, 9, 16))
        model(torch.randn(2, 9, 16))
    record = seen.records[0]
    assert {"variance", "log_normality.skew", "score_variance.total"} <= set(record.values)
    assert not any("quantiles" in name for name in record.values)
    assert len(seen.records) == 2 * 2 * 2 * 2
    path = tmp_path / "capture.json"
    content = json.loads(seen.to_json(path))
    assert json.loads(path.read_text()) == content
    assert content["records"][0]["entropy"] == record.values["entropy"]
    medians = seen.medians("entropy")["layers.0"]
    own = sorted(r.values["entropy"] for r in seen.records if (r.layer, r.head) == ("layers.0", 0))
    assert medians[0] == (own[1] + own[2]) / 2
    lines = seen.table().splitlines()
    assert lines[0].split()[:4] == ["layer", "head", "temperature", "entropy"]
    assert len(lines) == 1 + 4
    with pytest.raises(InvalidInputError, match="'warmth' was not measured; there are"):
        seen.medians("warmth")


def test_one_forward():
    model = Stack(Attention(), Attention())
    with capture(model, one_forward=True) as seen, capture(model) as other:
        for _ in range(3):
            model(torch.randn(1, 5, 16))
    assert [call.call for call in seen.calls] == [0, 0]
    assert [call.call for call in other.calls] == [0, 0, 1, 1, 2, 2]


def test_one_forward_ends_with_an_exception_too():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x):
            self.attention(x)
            raise OSError("disk")

    before, model = F.scaled_dot_product_attention, Failing()
    seen = capture(model, one_forward=True)
    seen.__enter__()
    with pytest.raises(OSError, match="disk"):
        model(torch.randn(1, 5, 16))
    assert F.scaled_dot_product_attention is before
    assert len(seen.calls) == 1


def test_captures_nest_and_see_only_their_own_model():
    first, second = Stack(Attention()), Stack(Attention(), LLNAttention(16, 2, batch_first=True))
    both, x = nn.ModuleDict({"a": first, "b": second}), torch.randn(1, 5, 16)
    with capture(both) as outer:
        with capture(second) as inner:
            first(x)
            second(x)
        second(x)
    assert outer.layers == ["a.layers.0", "b.layers.0", "b.layers.1.core"]
    assert [call.layer for call in inner.calls] == ["layers.0", "layers.1.core"]
    assert len(outer.calls) == 5


def test_everything_is_put_back_after_an_exception():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x):
            self.attention(x)
            raise OSError("disk")

    model, x = Failing(), torch.randn(1, 5, 16)
    with pytest.raises(OSError, match="disk"), capture(model) as seen:
        model(x)
    assert len(seen.calls) == 1
    # The module that failed is no longer under way.
    with capture(model.attention) as seen:
        model.attention(x)
    assert [call.layer for call in seen.calls] == [""]


def test_threads_do_not_mix():
    models = [Stack(Attention()), Stack(Attention(), Attention())]
    found, errors = {}, []
    ready = threading.Barrier(2)

    def run(index):
        try:
            with capture(models[index]) as seen:
                ready.wait(timeout=30)
                for _ in range(5):
                    models[index](torch.randn(1, 5, 16))
            found[index] = [call.layer for call in seen.calls]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found == {0: ["layers.0"] * 5, 1: ["layers.0", "layers.1"] * 5}


def test_no_attention_is_one_sentence_with_what_was_looked_for():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(InvalidInputError) as error, capture(model):
        model(torch.randn(2, 4))
    message = str(error.value)
    assert "saw no attention in Sequential" in message
    for door in ("lln", "scaled_dot_product_attention", "MultiheadAttention", "Hugging Face"):
        assert door in message
    # An exception of the block's own is not replaced.
    with pytest.raises(KeyError), capture(model):
        raise KeyError


def test_attention_outside_the_model_is_not_its_own():
    model = Stack(Attention())
    x = torch.randn(1, 2, 5, 8)
    running = capture(model)
    running.__enter__()
    F.scaled_dot_product_attention(x, x, x)
    lln_attention(x, x, x)
    with pytest.raises(InvalidInputError, match="saw no attention"):
        running.__exit__(None, None, None)


def test_refusals():
    model = Stack(Attention())
    with pytest.raises(InvalidInputError, match=r"capture needs a torch\.nn\.Module, got str"):
        capture("bert")
    with pytest.raises(InvalidInputError, match=r"instruments must be one of .*, got 'warmth'"):
        capture(model, instruments=("warmth",))
    with pytest.raises(InvalidInputError, match="max_calls must be an integer of at least 1"):
        capture(model, max_calls=0)
    running = capture(model)
    with running:
        model(torch.randn(1, 3, 16))
        with pytest.raises(InvalidInputError, match="already running"):
            running.__enter__()


def test_compiled_models_are_refused_with_the_way_out():
    model = Stack(Attention())
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(InvalidInputError, match=r"the model is compiled; .*_orig_mod"):
        capture(compiled).__enter__()
    with capture(compiled._orig_mod) as seen:
        compiled._orig_mod(torch.randn(1, 3, 16))
    assert len(seen.calls) == 1
    model.layers[0].compile(backend="eager")
    with pytest.raises(InvalidInputError, match=r"its part 'layers\.0' is compiled"):
        capture(model).__enter__()
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(InvalidInputError, match="TorchScript"):
        capture(nn.Sequential(scripted)).__enter__()


def test_a_compiled_function_around_the_model_is_not_disturbed():
    model = Stack(Attention())
    x = torch.randn(1, 5, 16)
    run = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    before = run(x)
    with pytest.raises(InvalidInputError, match="compiled graph"), capture(model):
        assert torch.equal(run(x), before)
    assert torch.equal(run(x), before)
