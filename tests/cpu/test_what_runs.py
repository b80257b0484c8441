"""What runs is what ``impl`` names: watched from outside, by library calls and operations."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lln
from lln.checks.call import Call
from lln.cpu import library
from lln.errors import BackendUnavailableError, InvalidInputError
from lln.functional import ways

BOUNDS = torch.tensor([0, 40, 40, 96])
MASK = torch.arange(96) < torch.tensor([[96], [40]])
GIVEN = {"alpha": 0.7, "beta": 1.3}
CAUSAL = GIVEN | {"is_causal": True}
KEYS = GIVEN | {"offset": -1.0, "block_size": 16}
# Of these no attention in PyTorch does without.
ARITHMETIC = {"exp", "exp_", "_softmax", "logsumexp", "mm", "bmm", "baddbmm", "baddbmm_", "mul"}


def packed(sides):
    return [side[0].transpose(0, 1) for side in sides]


def grouped(sides, **options):
    query, key, value = sides
    few = (key[:, :1], value[:, :1])
    return lln.lln_diag_attention(query, *few, block_size=16, enable_gqa=True, **options)


def decode(query, key, value, **options):
    summary = lln.KeySummary.of(key, value, 1.3)
    sides = (side[:, :, :1] for side in (query, key, value))
    return lln.decode_step(*sides, summary, alpha=0.7, **options)


CALLS = {
    "lln": lambda sides, **o: lln.lln_attention(*sides, **GIVEN, **o),
    "lln, matched": lambda sides, **o: lln.lln_attention(*sides, **o),
    "lln, masked": lambda sides, **o: lln.lln_attention(*sides, key_mask=MASK, **o),
    "lln, dropout": lambda sides, **o: lln.lln_attention(*sides, dropout_p=0.5, **o),
    "lln_diag": lambda sides, **o: lln.lln_diag_attention(*sides, block_size=16, **GIVEN, **o),
    "lln_diag, matched": lambda sides, **o: lln.lln_diag_attention(*sides, block_size=16, **o),
    "causal": lambda sides, **o: lln.lln_attention(*sides, **CAUSAL, **o),
    "packed": lambda sides, **o: lln.lln_attention_varlen(*packed(sides), BOUNDS, **GIVEN, **o),
    "packed, matched": lambda sides, **o: lln.lln_diag_attention_varlen(
        *packed(sides), BOUNDS, block_size=16, **o
    ),
    "narrow": lambda sides, **o: lln.lln_attention(*(side[..., :20] for side in sides), **o),
    "odd values": lambda sides, **o: lln.lln_attention(*sides[:2], sides[2][..., :20], **o),
    "odd blocks": lambda sides, **o: lln.lln_diag_attention(*sides, block_size=20, **o),
    "grouped": lambda sides, **o: grouped(sides, **o),
    "causal blocks": lambda sides, **o: lln.lln_diag_attention(
        *sides, block_size=16, **CAUSAL, **o
    ),
    "masked causal": lambda sides, **o: lln.lln_attention(*sides, key_mask=MASK, **CAUSAL, **o),
    "block_diagonal": lambda sides, **o: lln.block_diagonal_attention(*sides, block_size=16, **o),
    "window": lambda sides, **o: lln.window_attention(*sides, window=9, **o),
    "window, masked": lambda sides, **o: lln.window_attention(
        *sides, window=9, key_mask=MASK, is_causal=True, **o
    ),
    "packed window": lambda sides, **o: lln.window_attention_varlen(
        *packed(sides), BOUNDS, window=9, **o
    ),
    "no keys": lambda sides, **o: lln.lln_diag_attention(
        *sides, block_size=16, key_mask=MASK & torch.tensor([[True], [False]]), **o
    ),
    "keys": lambda sides, **o: lln.lln_keys_attention(*sides, keys=4, **KEYS, **o),
    "packed keys": lambda sides, **o: lln.lln_keys_attention_varlen(
        *packed(sides), BOUNDS, keys=4, **KEYS, **o
    ),
    # These without gradients.
    "pages": lambda sides, **o: lln.page_attention(*sides, window=9, pages=2, page_size=8, **o),
    "causal pages": lambda sides, **o: lln.page_attention(
        *sides, window=9, pages=2, page_size=8, key_mask=MASK, is_causal=True, **o
    ),
    "packed pages": lambda sides, **o: lln.page_attention_varlen(
        *packed(sides), BOUNDS, window=9, pages=2, page_size=8, **o
    ),
    # Of these PyTorch computes the statistics only, as it always does.
    "paper": lambda sides, **o: lln.lln_attention(*sides, matching="paper", **o),
    "matched keys": lambda sides, **o: lln.lln_keys_attention(*sides, keys=4, block_size=16, **o),
    # Compiled passes do not compute these.
    "decode": lambda sides, **o: decode(*sides, **o),
}
COMPILED = list(CALLS)[: list(CALLS).index("paper")]
FORWARD_ONLY = ("pages", "causal pages", "packed pages")
COMPILED_AS_DOCUMENTED = [*COMPILED, "paper", "matched keys"]


class Watched:
    """The functions of a library, and which of them were called."""

    def __init__(self, functions):
        self.functions, self.called = functions, []

    def __getattr__(self, name):
        def call(*given):
            self.called.append(name)
            return getattr(self.functions, name)(*given)

        return call


@pytest.fixture
def watched(functions, monkeypatch):
    found = Watched(functions)
    monkeypatch.setattr(library, "_found", found)
    return found


@pytest.fixture
def plans(monkeypatch):
    """The sentence of every plan."""
    found, own = [], ways.prepare

    def noted(*given):
        found.append(own(*given))
        return found[-1]

    monkeypatch.setattr(ways, "prepare", noted)
    return found


def sides_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [side.to(dtype) for side in torch.randn(3, 2, 3, 96, 32, generator=generator)]


def operations(call):
    """Which operations of PyTorch a call takes."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return {event.key.removeprefix("aten::") for event in seen.key_averages()}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("learns", [False, True])
def test_eager_is_plain_pytorch(kind, learns, watched, plans):
    sides = [side.requires_grad_(learns) for side in sides_of()]

    def call():
        out = CALLS[kind](sides, impl="eager")
        if learns:
            torch.autograd.grad(out.sum(), sides)

    assert operations(call) & ARITHMETIC
    assert not watched.called
    assert all(str(plan).startswith("Plain PyTorch computes the call") for plan in plans)


@pytest.mark.parametrize("kind", COMPILED)
def test_cpu_is_compiled(kind, watched, plans):
    learns = kind not in FORWARD_ONLY
    sides = [side.requires_grad_(learns) for side in sides_of()]

    def call():
        out = CALLS[kind](sides, impl="cpu")
        if learns:
            torch.autograd.grad(out.sum(), sides)

    # Dropped values are zeroed by a product before the call, and causal parts joined after it.
    others = {"mul"} if kind in ("lln, dropout", "causal blocks") else set()
    assert not operations(call) & ARITHMETIC - others
    forward = {"lln_causal_forward", "lln_forward", "lln_keys_forward", "lln_pages_forward"}
    assert forward & set(watched.called)
    backward = {"lln_causal_backward", "lln_backward", "lln_keys_backward"}
    assert bool(backward & set(watched.called)) == learns
    # Not even a part of it is computed otherwise.
    assert not any("torch" in str(plan) for plan in plans) or "causal" in kind
    assert str(plans[0]).startswith("Compiled passes compute the call")


@pytest.mark.parametrize("kind", [kind for kind in CALLS if kind not in COMPILED_AS_DOCUMENTED])
def test_cpu_refuses_what_the_passes_do_not_compute(kind, watched):
    errors = (BackendUnavailableError, InvalidInputError)
    with pytest.raises(errors, match=r"impl='cpu'.*use .*'eager'"):
        CALLS[kind](sides_of(), impl="cpu")
    assert not watched.called


def test_cpu_is_refused_without_compiled_passes(monkeypatch):
    monkeypatch.setattr(library, "_found", "LLN_CPU=torch switches them off")
    with pytest.raises(BackendUnavailableError, match="has no compiled passes here: LLN_CPU"):
        CALLS["lln"](sides_of(), impl="cpu")
    with pytest.raises(BackendUnavailableError, match="impl='cpu' has no compiled passes"):
        lln.LLNAttention(32, 2, impl="cpu")(torch.randn(1, 8, 32))


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_auto_says_what_it_takes(kind, dtype, watched, plans):
    assert CALLS[kind](sides_of(dtype)).isfinite().all()
    said = " ".join(map(str, plans))
    assert ("ompiled passes compute" in said) == any("ward" in name for name in watched.called)
    assert ("ompiled passes" in said) == bool(watched.called)
    if dtype != torch.float64 and kind in COMPILED_AS_DOCUMENTED:
        assert watched.called


@pytest.mark.parametrize("kind", [kind for kind in CALLS if kind not in ("decode", "lln, dropout")])
def test_the_reference_computes_and_matches_in_float64(kind, watched):
    sides = sides_of()
    found = CALLS[kind](sides, impl="reference")
    wide = CALLS[kind]([side.double() for side in sides], impl="reference")
    assert torch.equal(found, wide.float())
    assert not watched.called


@pytest.mark.parametrize("kind", CALLS)
def test_triton_is_refused_on_a_cpu(kind, watched):
    with pytest.raises(BackendUnavailableError, match="impl='triton'"):
        CALLS[kind](sides_of(), impl="triton")
    assert not watched.called


@pytest.mark.parametrize("impl", ["auto", "eager", "cpu", "reference"])
def test_modules_match_as_their_impl_says(impl, watched):
    layer, x = lln.LLNAttention(32, 2, batch_first=True, impl=impl), torch.randn(2, 24, 32)
    assert layer(x)[0].isfinite().all()
    assert bool(watched.called) == (impl in ("auto", "cpu"))
    query, key = sides_of()[:2]
    assert ways.prepare(Call("temperatures", query, key[:, :1], key[:, :1]), "cpu").impl == "cpu"
    with pytest.raises(BackendUnavailableError, match="impl='cpu' cannot match"):
        ways.prepare(Call("temperatures", query.double(), key.double(), key.double()), "cpu")


def test_nothing_is_computed_of_empty_tensors(watched):
    empty = [side[:0] for side in sides_of()]
    assert lln.lln_attention(*empty, impl="cpu").shape == (0, 3, 96, 32)
    assert not watched.called
