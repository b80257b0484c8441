"""Every operator of the kernels is what it says it is: schema, fakes, gradients, compilation."""

from itertools import islice

import pytest
import torch
from tests.kernels.common import DEVICE, holes

from lln.kernels.blocks import block_ops
from lln.kernels.keys import keys_ops
from lln.kernels.lln import lln_ops
from lln.kernels.pages import page_ops
from lln.kernels.summaries import summary_ops
from lln.testing import make_qkv

WITH_GRADIENTS = {
    "attend_saving", "attend_blocks", "attend_keys", "attend_pages", "attend_window", "summarise",
    "read_summary",
}  # fmt: skip
# Those that run no kernel: see tests/parallel/test_alone.py and tests/nn/test_modules.py.
OTHERS = {"gather_ranks", "exchange_rows", "inside_backward"}
# As small as an odd call can be: the interpreter takes a program for every feature.
TOKENS, WIDTH, VALUE_WIDTH, BLOCK = 18, 2, 3, 16
NUMBERS = (0.8, 0.9, -1.0)


def sides_of(wanted=True, key_heads=1):
    """Query, key and value as Hugging Face lays them out."""
    return make_qkv(
        1, 2, TOKENS, WIDTH, key_heads=key_heads, value_width=VALUE_WIDTH,
        device=DEVICE, layout="transposed", requires_grad=wanted,
    )  # fmt: skip


def numbers_of(wanted=True, heads=(2, 1, 2)):
    """α, β and offset, or another triple, one for every head."""
    return [
        torch.linspace(0.7, 1.1, count, device=DEVICE).view(1, count, 1, 1).requires_grad_(wanted)
        for count in heads
    ]


def plain(*arguments):
    return [side.detach() if isinstance(side, torch.Tensor) else side for side in arguments]


def gradient_like(out):
    return torch.randn(out.shape, device=DEVICE).to(out.dtype)


def choose_keys(mask=None):
    query, key, _ = sides_of(wanted=False)
    yield query, key, mask, 3, BLOCK, BLOCK // 2, False
    yield query, key, mask, 0, BLOCK, BLOCK, True


def attend_keys(mask=None):
    query, key, value = sides_of()
    numbers = (*NUMBERS, BLOCK)
    groups = keys_ops.fused_choice(
        query, key, mask, 3, block_size=BLOCK, group_size=BLOCK, flip=False
    )
    for learned in (numbers_of(), (None,) * 3):
        yield query, key, value, *learned, groups, mask, *numbers, BLOCK, 0.5


def attend_keys_backward(mask=None):
    for arguments in attend_keys(mask):
        given = plain(*arguments)
        found = keys_ops.attend_keys(*given)
        yield gradient_like(found[0]), *given, *found


def attend_saving(mask=None, wanted=True):
    sides = sides_of(wanted)
    alpha, beta, mix = numbers_of(wanted)
    for learned in ((alpha, beta, mask, mix), (None, None, mask, None)):
        for is_causal in (False, True):
            yield *sides, *learned, None, *NUMBERS[:2], 0.5, BLOCK, 0.5, 0.0, 0, is_causal, 0


def attend(mask=None):
    yield from attend_saving(mask, wanted=False)


def attend_backward(mask=None):
    for arguments in attend_saving(mask, wanted=False):
        out, *summary = lln_ops.attend_saving(*arguments)
        asked = [arguments[place] is not None for place in (3, 4, 6)]
        yield gradient_like(out), *arguments, *summary, *asked


def attend_blocks(mask=None):
    for is_causal in (False, True):
        yield *sides_of(key_heads=2), mask, BLOCK, 0.5, is_causal


def attend_blocks_backward(mask=None):
    for arguments in attend_blocks(mask):
        given = plain(*arguments)
        yield gradient_like(block_ops.attend_blocks(*given)), *given


def attend_window(mask=None):
    for is_causal in (False, True):
        yield *sides_of(key_heads=2), mask, None, 5, False, 0.5, is_causal
        if mask is None:
            yield *sides_of(key_heads=2), None, None, BLOCK, True, 0.5, is_causal
    places = torch.arange(TOKENS, device=DEVICE, dtype=torch.int32)
    yield *sides_of(), None, places + 6 * (places > 7), 5, False, 0.5, False


def attend_window_backward(mask=None):
    for arguments in attend_window(mask):
        given = plain(*arguments)
        found = block_ops.attend_window(*given)
        yield gradient_like(found[0]), *given, *found


def choose_pages(mask=None):
    query, key, _ = sides_of(wanted=False)
    yield query, key, mask, 3, 2, 4, True, 2


def attend_pages(mask=None):
    for queries in (TOKENS, 3):
        query, key, value = sides_of()
        query = query.detach()[:, :, -queries:].requires_grad_()
        pages = page_ops.choose_pages(*plain(query, key), mask, 3, 2, 4, True, 2)
        yield query, key, value, pages, mask, 3, 2, 4, True, 0.5


def attend_pages_backward(mask=None):
    for arguments in attend_pages(mask):
        given = plain(*arguments)
        found = page_ops.attend_pages(*given)
        yield gradient_like(found[0]), *given, *found


def match(mask=None):
    query, key, _ = sides_of(wanted=False)
    yield query, key, mask, None, "entropy", 0


def decode(mask=None):
    query, key, value = (side[:, :, :1] for side in sides_of(False, key_heads=2))
    log_mass = torch.randn(1, 2, WIDTH, device=DEVICE)
    centroid = torch.randn(1, 2, WIDTH, VALUE_WIDTH, device=DEVICE)
    yield query, key, value, log_mass, centroid, *numbers_of(False, (2, 2)), 1.0, 1.0
    yield query, key, value, log_mass, centroid, None, None, 1.0, 1.0


def summarise(mask=None):
    _, key, value = sides_of()
    yield key, value, *numbers_of(heads=(1,)), mask, 1.0
    yield key, value, None, mask, 0.9


def summarise_backward(mask=None):
    for arguments in summarise(mask):
        given = plain(*arguments)
        found = summary_ops.summarise(*given)
        gradients = [gradient_like(side) for side in found]
        yield *gradients, *given, *found, given[2] is not None


def read_summary(mask=None):
    query, key, value = sides_of()
    summary = summary_ops.summarise(*plain(key, value), None, None, 0.9)
    learned = [side.requires_grad_() for side in summary]
    yield query, *numbers_of(heads=(2,)), *learned, mask, 1.0
    yield query, None, *learned, mask, 0.8


def read_summary_backward(mask=None):
    for arguments in read_summary(mask):
        given = plain(*arguments)
        yield gradient_like(summary_ops.read_summary(*given)), *given, given[1] is not None


CASES = {
    case.__name__: case
    for case in (
        attend, attend_saving, attend_backward, attend_blocks, attend_blocks_backward,
        attend_keys, attend_keys_backward, attend_pages, attend_pages_backward,
        attend_window, attend_window_backward, choose_keys, choose_pages, decode, match,
        read_summary, read_summary_backward, summarise, summarise_backward,
    )
}  # fmt: skip


def check(name, cases, **options):
    for arguments in cases:
        torch.library.opcheck(getattr(torch.ops.lln, name).default, arguments, **options)


@pytest.mark.parametrize("name", CASES)
def test_operator_is_well_formed(name):
    cases = CASES[name](holes(1, TOKENS))
    # The other checks run an operator many times over, and say most where there are gradients.
    quick = {"test_utils": ("test_schema", "test_faketensor")}
    check(name, islice(cases, 1), **({} if name in WITH_GRADIENTS else quick))
    check(name, islice(cases, 1), **quick)


def heads_first(*shape):
    """Numbers of a head that lie next to each other in memory, as a product over heads leaves them.

    Takes samples, heads, tokens and channels; a gradient of it lies as the kernels write it.
    """
    samples, heads, *rest = shape
    return torch.rand(heads, samples, *rest, device=DEVICE).transpose(0, 1)


def laid_out_otherwise():
    """Backward passes of two samples whose α, β, offset or mix are `heads_first`."""
    sides = make_qkv(2, 2, TOKENS, WIDTH, value_width=VALUE_WIDTH, device=DEVICE)
    alpha, beta, offset = (heads_first(2, 2, 1, 1) for _ in range(3))
    for is_causal, tokens, channels in ((False, TOKENS, 1), (True, 1, VALUE_WIDTH)):
        tensors = *sides, alpha, beta, None, heads_first(2, 2, tokens, channels), None
        numbers = *NUMBERS[:2], 0.5, BLOCK, 0.5, 0.0, 0, is_causal, 0
        out, *summary = lln_ops.attend_saving(*tensors, *numbers)
        yield "attend_backward", gradient_like(out), *tensors, *numbers, *summary, *[True] * 3
    query, key, value = sides
    choice = keys_ops.fused_choice(
        query, key, None, 3, block_size=BLOCK, group_size=BLOCK, flip=False
    )
    given = *sides, alpha, beta, offset, choice, None, *NUMBERS, BLOCK, BLOCK, 0.5
    found = keys_ops.attend_keys(*given)
    yield "attend_keys_backward", gradient_like(found[0]), *given, *found
    given = key, value, beta, None, 1.0
    summary = summary_ops.summarise(*given)
    yield "summarise_backward", *map(gradient_like, summary), *given, *summary, True
    given = query, alpha, *summary, None, 1.0
    yield "read_summary_backward", gradient_like(summary_ops.read_summary(*given)), *given, True


def test_gradients_of_numbers_lie_as_the_fakes_say():
    for name, *arguments in laid_out_otherwise():
        check(name, [arguments], test_utils=("test_faketensor",))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_operator_is_well_formed_in_every_form(name):
    for mask in (None, holes(1, TOKENS)):
        check(name, CASES[name](mask))


def test_no_operator_is_left_out():
    every = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    assert {name for package, _, name in every if package == "lln"} - OTHERS == set(CASES)
