"""The cost of a layer's attention: counted as stated, measured where it does not take too long."""

from dataclasses import replace

import pytest
import torch

from lln_lab.conversion import attention_cost
from lln_lab.conversion.attention_cost import AttentionShape, measure_calls

SHAPE = AttentionShape(
    heads=2,
    key_heads=2,
    width=8,
    value_width=4,
    block_size=16,
    group_size=16,
    is_causal=False,
    impl="auto",
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def test_operations_are_those_stated():
    assert SHAPE.operations(100, None) == 100 * 2 * 100 * 12
    per_token = (16 + 32) * 12 + 2 * 8 * 5 + 100 * 8 / 16
    assert SHAPE.operations(100, 32) == pytest.approx(100 * 2 * per_token)
    # Without keys nothing is selected, and no more are read than there are.
    assert SHAPE.operations(100, 0) == 100 * 2 * (16 * 12 + 2 * 8 * 5)
    assert SHAPE.operations(100, 84) == SHAPE.operations(100, 256)
    causal = replace(SHAPE, is_causal=True)
    assert causal.operations(100, None) == SHAPE.operations(100, None) / 2
    near = replace(SHAPE, window=8)
    assert near.operations(100, None) == 100 * 2 * 17 * 12
    assert replace(near, is_causal=True).operations(100, None) == 100 * 2 * 9 * 12
    assert replace(near, window=99).operations(100, None) == SHAPE.operations(100, None)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", [None, 0, 8])
def test_calls_are_measured_until_they_take_too_long(keys, is_causal):
    shape = replace(SHAPE, heads=4, is_causal=is_causal)
    found = measure_calls(shape, keys, (64, 128))
    assert all(seconds > 0 for seconds in found.values())
    found = measure_calls(shape, keys, (64, 128, 256), most_seconds=0.0)
    assert found[64] > 0
    assert (found[128], found[256]) == (None, None)


def test_a_layer_with_a_window_is_measured_within_it(monkeypatch):
    windows = []
    monkeypatch.setattr(
        attention_cost, "window_attention", lambda *_, window, **__: windows.append(window)
    )
    measure_calls(replace(SHAPE, window=8), None, (64,))
    assert set(windows) == {8}
