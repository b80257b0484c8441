"""Arguments of other attentions are answered with what to use instead."""

import inspect

import pytest
import torch

import lln
from lln import InvalidInputError, LLNError, UnexpectedArgumentError
from lln.checks.signatures import explain_misfits

B, H, T, D = 2, 4, 6, 8
DENSE = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(0)).unbind()
PACKED = [side[0].transpose(0, 1) for side in DENSE]
BOUNDS = torch.tensor([0, 2, T])
MASK = torch.ones(T, T, dtype=torch.bool)
X = torch.randn(B, T, H * D)


def block_diagonal(*args, **options):
    return lln.block_diagonal_attention(*args, block_size=4, **options)


FUNCTIONS = {
    "lln_attention": lln.lln_attention,
    "lln_diag_attention": lln.lln_diag_attention,
    "block_diagonal_attention": block_diagonal,
    "LLNCore": lln.LLNCore(H, D),
    "LLNDiagCore": lln.LLNDiagCore(H, D),
}
PACKED_FUNCTIONS = {
    "lln_attention_varlen": lln.lln_attention_varlen,
    "lln_diag_attention_varlen": lln.lln_diag_attention_varlen,
}
each_dense = pytest.mark.parametrize("name", FUNCTIONS)
each_packed = pytest.mark.parametrize("name", PACKED_FUNCTIONS)


def refusal(call, *fragments):
    """The sentence of a refusal that ``except TypeError`` and ``except LLNError`` both catch."""
    with pytest.raises(UnexpectedArgumentError) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, InvalidInputError)
    assert isinstance(caught.value, LLNError)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 300, message
    for fragment in fragments:
        assert fragment in message, message


@each_dense
@pytest.mark.parametrize("argument", ["attn_mask", "attn_bias"])
def test_masks_of_pairs_are_answered_with_masks_of_keys(name, argument):
    call = FUNCTIONS[name]
    refusal(
        lambda: call(*DENSE, **{argument: MASK}),
        f"{name} has no {argument}",
        "N×N",
        "key_mask= (bool [B, S], True = attend)",
        "is_causal=True",
    )


@each_dense
def test_a_mask_by_position_is_asked_for_by_name(name):
    refusal(
        lambda: FUNCTIONS[name](*DENSE, MASK),
        f"{name} takes query, key and value by position and all else by name",
        "Tensor",
        "key_mask=, bool [B, S], True = attend",
    )


@each_dense
def test_dropout_by_position_is_asked_for_by_name(name):
    refusal(lambda: FUNCTIONS[name](*DENSE, 0.1), "all else by name", "got float after them.")


@each_dense
def test_padding_in_the_opposite_sense_is_turned_round(name):
    call = FUNCTIONS[name]
    refusal(lambda: call(*DENSE, key_padding_mask=MASK[:1]), "key_mask=~key_padding_mask", "attend")


@pytest.mark.parametrize("name", ["lln_attention", "LLNCore", "LLNDiagCore"])
@pytest.mark.parametrize("argument", ["scale", "softmax_scale"])
def test_scale_is_answered_with_what_does_the_same(name, argument):
    call = FUNCTIONS[name]
    refusal(
        lambda: call(*DENSE, **{argument: 0.5}),
        f"{name} has no {argument}",
        "alpha and beta",
        "multiply query by scale * D**0.5",
    )


def test_the_advice_on_scale_is_right():
    """Softmax attention of another scale is that of a query multiplied as the sentence says."""
    query, key, _ = (side.double() for side in DENSE)
    scale = 0.9
    moved = lln.match_moments(query * (scale * D**0.5), key, criterion="variance")
    scores = lln.reference.softmax_matrix(query, key, scale=scale)
    again = lln.reference.softmax_matrix(query * (scale * D**0.5), key)
    torch.testing.assert_close(scores, again)
    assert not torch.allclose(moved[1], lln.match_moments(query, key)[1])


@each_packed
@pytest.mark.parametrize("argument", ["attn_mask", "key_padding_mask"])
def test_packed_functions_advise_only_what_they_take(name, argument):
    call = PACKED_FUNCTIONS[name]
    with pytest.raises(UnexpectedArgumentError) as caught:
        call(*PACKED, BOUNDS, **{argument: MASK})
    assert f"{name} has no {argument}" in str(caught.value)
    assert "carry no padding" in str(caught.value)
    assert "key_mask=" not in str(caught.value)


@each_packed
def test_packed_functions_want_all_but_four_by_name(name):
    call = PACKED_FUNCTIONS[name]
    refusal(lambda: call(*PACKED, BOUNDS, BOUNDS), "query, key, value and cu_seqlens by position")


@pytest.mark.parametrize(
    ("argument", "meant"),
    [("dropout", "dropout_p"), ("causal", "is_causal"), ("mask", "key_mask")],
)
def test_arguments_nearly_right(argument, meant):
    refusal(
        lambda: lln.lln_attention(*DENSE, **{argument: None}),
        f"no argument {argument!r} (did you mean {meant!r}?)",
        "it takes query, key, value, alpha",
    )


def test_modules_with_projections_have_the_padding_mask_of_torch():
    layer = lln.LLNAttention(H * D, H, batch_first=True)
    refusal(lambda: layer(X, key_mask=MASK), "LLNAttention has no key_mask", "key_padding_mask=~")
    refusal(lambda: layer(X, scale=2.0), "LLNAttention has no scale")
    refusal(lambda: layer(X, X, X, None, False, None, True, False, None), "NoneType after them")


def test_what_is_missing_or_given_twice():
    query, key, value = DENSE
    refusal(lambda: lln.lln_attention(query, key), "lln_attention needs value")
    refusal(lambda: lln.lln_attention(), "needs query, key and value")
    refusal(lambda: lln.block_diagonal_attention(*DENSE), "needs block_size")
    refusal(lambda: lln.lln_attention(query, key, value, key=key), "got key twice")


@pytest.mark.parametrize("cls", [lln.LLNAttention, lln.LLNDiagAttention])
@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_what_only_torchs_attention_has_is_refused_in_the_name_of_the_class(cls, option):
    refusal(lambda: cls(16, 2, **{option: True}), f"{cls.__name__} has no {option}", "append")


@pytest.mark.parametrize(
    ("build", "fragments"),
    [
        (lambda: lln.LLNAttention(16, 2, dropuot=0.1), ("LLNAttention", "'dropout'", "matching")),
        (lambda: lln.LLNAttention(16, 2, join="gate"), ("LLNAttention has no argument 'join'",)),
        (lambda: lln.LLNAttention(16, 2, head_dim=8), ("LLNAttention has no argument 'head_dim'",)),
        (lambda: lln.LLNDiagAttention(16, 2, blocksize=8), ("LLNDiagAttention", "'block_size'")),
        (lambda: lln.LLNAttention(16, 2, 0.0, True, False), ("LLNAttention takes embed_dim",)),
        (lambda: lln.LLNAttention(16), ("LLNAttention needs num_heads",)),
        (lambda: lln.LLNCore(2, 8, matchin="paper"), ("LLNCore", "'matching'")),
        (lambda: lln.LLNDiagCore(2, 8, matchin="paper"), ("LLNDiagCore", "'matching'", "join")),
        (lambda: lln.LLNDiagCore(2, 8, colour="red"), ("LLNDiagCore has no argument 'colour'",)),
    ],
)
def test_constructors_name_the_class_that_was_called(build, fragments):
    refusal(build, *fragments)


def test_errors_from_inside_pass_unchanged():
    @explain_misfits
    def fails(query):
        raise TypeError("from inside")

    with pytest.raises(TypeError, match=r"^from inside$") as caught:
        fails(1)
    assert caught.type is TypeError


@pytest.mark.parametrize("function", [lln.lln_attention, lln.LLNCore.forward, lln.LLNAttention])
def test_signatures_show_what_is_taken_and_nothing_else(function):
    kinds = {one.kind for one in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    names = inspect.signature(function).parameters
    assert not {"args", "kwargs", "attn_bias", "key_padding_mask", "scale"} & set(names)


def test_every_entry_point_has_code_of_its_own():
    """torch.compile allows eight recompilations a code object: sharing one would use them up."""
    functions = [lln.lln_attention, lln.lln_diag_attention, lln.lln_attention_varlen]
    functions += [lln.LLNCore.forward, lln.LLNAttention.forward]
    assert len({id(function.__code__) for function in functions}) == len(functions)


def test_a_compiled_call_that_does_not_fit_gets_the_sentence_too():
    compiled = torch.compile(lln.lln_attention, backend="eager")
    refusal(lambda: compiled(*DENSE, attn_mask=MASK), "lln_attention has no attn_mask")
