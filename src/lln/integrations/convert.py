"""Turn a loaded Hugging Face model linear, and prove that it is.

    from lln.integrations.convert import convert

    convert(model, calibrate=tokenizer(texts, return_tensors="pt"))

The model is run twice on a batch. In the first run every attention layer still answers with
softmax while its LLN counterpart is calibrated and compared beside it; the second run shows that
our attention ran in every layer. A model that keeps its attention to itself is refused.

    convert(model, target=0.99, calibrate=batch)

chooses how many exact keys every layer needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lln.checks.arguments import check_flag
from lln.checks.signatures import explain_misfits
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.attached import AttachedHeads, attach, attached_to
from lln.integrations.attend import observed
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import Conversion, relative_change
from lln.integrations.eval_mode import evaluating
from lln.integrations.model_state import undone_on_error
from lln.integrations.own_attention import refuse_own_attention
from lln.integrations.progress import step_bar
from lln.integrations.searches import OnStep, search_for
from lln.integrations.settings import Settings
from lln.integrations.surgeon import Surgeon
from lln.integrations.transformers import register
from lln.integrations.trial_batch import check_inputs, example_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@explain_misfits
def convert(
    model: PreTrainedModel,
    attention: str = "lln_keys",
    *,
    layers: Sequence[int | str] | None = None,
    calibrate: Mapping[str, Tensor] | None = None,
    target: float | None = None,
    holdout: Mapping[str, Tensor] | None = None,
    batch: Mapping[str, Tensor] | None = None,
    statistics: str | None = None,
    matching: str | None = None,
    mix: float | str = 0.5,
    block_size: int | None = None,
    keys: int | None = None,
    group_size: int | None = None,
    pages: int | None = None,
    page_size: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    rank: int | None = None,
    convolution: int = 0,
    momentum: float = 0.1,
    impl: str = "auto",
    or_softmax: bool = True,
    verbose: bool = False,
    on_step: OnStep | None = None,
) -> Conversion:
    """Replace the attention of a loaded model, in place.

    Args:
        model: Any model whose layers use transformers' attention interface.
        attention: ``"lln_keys"``, which stays closest to softmax (exact keys beside the summary,
            see `lln.lln_keys_attention`), ``"lln_diag"`` or ``"lln"``.
        layers: Which attention modules to convert: numbers in the order they run, or names; None =
            all. The others stay softmax. Layers with a sliding window always do: within it they
            are exact and linear already.
        calibrate: A batch of the model's inputs, on its device. α and β of every head are found on
            it so that LLN attention is as concentrated as the model's softmax (`lln.calibrate`);
            of ``"lln_keys"`` also the offset (`lln.calibrate_keys`).
        target: How close the converted model has to be to the original on ``calibrate``, as a mean
            cosine of logits, or of the mean hidden state of models without a head: a number
            between 0 and 1. Every layer then gets as few exact keys as that allows, 0 to 256, or
            stays softmax where 256 do not suffice; the model runs at most 30 times to find out. The
            search comes with the laboratory (`lln_lab.conversion`).
        holdout: With a target: a batch that was not calibrated on, to verify it.
        batch: Inputs of the proving runs without ``calibrate``; None = a small made-up batch.
        statistics: Where α and β come from (see `lln.LLNCore`); None = ``"fixed"`` with
            ``calibrate``, else ``"sample"``. ``"running"`` and ``"learned"`` start from
            ``calibrate``.
        matching: Criterion of ``"sample"`` and ``"running"``; None = ``"rest"`` for
            ``"lln_keys"``, else ``"variance"``.
        mix: Weight of the LLN part of ``"lln_diag"``: a number, or a learned join: ``"ratio"``,
            ``"scale"``, ``"gate"`` or ``"heads"`` (see `lln.LLNDiagCore`).
        block_size: Tokens in a diagonal block; None = the head width, 64 for ``"lln_keys"``.
        keys: Of ``"lln_keys"``: how many keys outside its block a group of queries sees; None = 64.
        group_size: Queries that share them; None = a block.
        pages: Of ``"lln_keys"``: how many pages a query sees beside its window and the first
            tokens, in place of block, keys and slots (see `lln.page_attention`); 0 = blocks, keys
            and slots. None = what suits the model: pages where it is causal or knows places by
            rotations, unless what belongs to blocks is given.
        page_size: Tokens in a page; None = 16.
        window: Tokens that a query sees before its own, or on either side; None = 127, or 64.
        sinks: First tokens that every query sees; None = 16 in a causal model, else 0.
        rank: Numbers per token that pages are chosen by, with projections found on ``calibrate``
            (`lln.PageIndex`); None = half the head width. Without ``calibrate`` keys are used.
        convolution: Tokens under a depthwise convolution of the values, added to the output of
            every converted layer: an odd number, 0 = none. It starts at zero and changes nothing
            until it is trained, as by `lln recover`. For encoders.
        momentum: Of ``"running"``.
        impl: As in `lln.lln_attention`.
        or_softmax: Whether layers with exact keys or pages run softmax itself, as before, in calls
            that are sooner with it; the first training step ends that.
        verbose: Whether to print the table too, for scripts; a shell or notebook shows it anyhow.
        on_step: Called with the part of the work, the step and how many there are at most: before
            the first layer with step 0, then after every step. None = a progress bar, if stderr is
            a terminal.

    Returns:
        What changed, and how far each layer's output and the model's moved; its text is a table.
        With a target also quality against time for other numbers of keys, as ``.target``.

    Raises:
        UnsupportedModelError: If our attention did not run in every layer.
        InvalidInputError: One sentence on what does not fit, also if an earlier conversion has α
            and β that this one would not replace. The model is then as it was.
        BackendUnavailableError: If a target needs the laboratory, and it is not installed.

    Warns:
        CalibrationWarning: If α and β rest on few tokens or are far larger than usual, if the
            output moved far, if an earlier conversion was replaced, or if a target is missed on
            held-out data.
    """
    check_flag("or_softmax", or_softmax)
    register()
    _check_model(model)
    settings = Settings.of_conversion(
        attention,
        calibrate is not None,
        statistics,
        matching,
        mix,
        momentum=momentum,
        block_size=block_size,
        keys=keys,
        group_size=group_size,
        pages=pages if attention == "lln_keys" else 0,
        page_size=page_size,
        window=window,
        sinks=sinks,
        rank=rank,
        convolution=convolution,
        impl=impl,
    )
    search = search_for(target, holdout, model, attention, settings.statistics, keys, calibrate)
    earlier = _earlier(model)
    if calibrate is None and earlier is not None and _is_worth_keeping(earlier):
        raise InvalidInputError(
            f"{type(model).__name__} is converted already, and its α, β and joins "
            f"(statistics {earlier.statistics!r}, mix {earlier.mix!r}) would be lost; pass "
            "calibrate, inputs to find new ones on, or convert the original model."
        )
    given = {"calibrate": calibrate, "batch": batch}
    checked = [check_inputs(name, it, model) for name, it in given.items() if it is not None]
    inputs = checked[0] if checked else example_inputs(model)
    unseen = None if holdout is None else check_inputs("holdout", holdout, model)
    shown = step_bar() if on_step is None else nullcontext(on_step)
    with undone_on_error(model), evaluating(model), shown as tell:
        _switch(model, attention)
        told = partial(tell, "layers")
        surgeon = Surgeon(model, attention, settings, layers, calibrate is not None, told, search)
        with observed(surgeon.look):
            outputs = model(**inputs)
        surgeon.check()
        report = Conversion(attention, settings.statistics, surgeon.reports)
        if search is not None:
            surgeon.write_settings()
            report.target, report.layers = search.run(
                lambda inputs: model(**inputs), attach, inputs, outputs, unseen, tell
            )
        surgeon.write_settings()
        found, expected = _prove(model, inputs, surgeon), _output(outputs)
        report.moved = relative_change(found, expected, inputs.get("attention_mask"))
        # Not before: all that is measured above is of exact keys.
        report.or_softmax = or_softmax and attention == "lln_keys"
        surgeon.write_settings(report.or_softmax)
    report.replaced = earlier is not None and _is_worth_keeping(earlier)
    report.warn()
    if verbose:
        report.show()
    return report


def _prove(model: PreTrainedModel, inputs: dict[str, Tensor], surgeon: Surgeon) -> Tensor:
    """Run the converted model and count the layers in which our attention ran."""
    seen: set[int] = set()

    def count(call: AttentionCall) -> None:
        seen.add(id(call.module))

    with observed(count):
        outputs = model(**inputs)
    missing = [surgeon.names[id(module)] for module in surgeon.modules if id(module) not in seen]
    if missing:
        raise UnsupportedModelError(
            f"LLN attention did not run in {', '.join(missing)} of {type(model).__name__}."
        )
    return _output(outputs)


def _check_model(model: Any) -> None:
    """Refuse what is no model of transformers, with where to find one."""
    if not hasattr(model, "set_attn_implementation"):
        raise InvalidInputError(
            f"convert takes a model that from_pretrained loaded, got {type(model).__name__}; a "
            "SentenceTransformer holds it as model[0].auto_model, and "
            "lln.integrations.timm.convert takes timm's."
        )


def _earlier(model: PreTrainedModel) -> Settings | None:
    """The settings of a conversion that was made before."""
    attached = (attached_to(module) for module in model.modules())
    return next((heads.settings for heads in attached if isinstance(heads, AttachedHeads)), None)


def _is_worth_keeping(settings: Settings) -> bool:
    """Whether a conversion left something in the model that another one would drop."""
    trained = isinstance(settings.mix, str) or settings.convolution > 0
    return settings.statistics != "sample" or trained


def _switch(model: PreTrainedModel, attention: str) -> None:
    """Let the attention interface dispatch to us."""
    refuse_own_attention(model, attention)
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use transformers' attention interface, or its source "
            "cannot be read; it cannot be converted."
        )
    model.set_attn_implementation(attention)


def _output(outputs: Any) -> Tensor:
    """The first tensor of a model's output: logits or hidden states."""
    return outputs[0]
