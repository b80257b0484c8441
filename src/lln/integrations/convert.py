"""Turn a loaded Hugging Face model linear, and prove that it is.

    from lln.integrations.convert import convert

    convert(model, attention="lln_diag", calibrate=tokenizer(texts, return_tensors="pt"))

The model is run twice on a batch. In the first run every attention layer still answers with
softmax while its LLN counterpart is calibrated and compared beside it; the second run shows that
our attention ran in every layer. A model that keeps its attention to itself is refused.

    convert(model, target=0.99, calibrate=batch)

chooses how many exact keys every layer needs (`lln.integrations.target`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lln.checks.names import check_choice, did_you_mean
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.attached import ATTRIBUTE, AttachedHeads, KeptSoftmax, attach, attached_to
from lln.integrations.attend import observed
from lln.integrations.attention_call import AttentionCall
from lln.integrations.attention_cost import AttentionShape
from lln.integrations.conversion_report import Conversion, LayerReport, relative_change
from lln.integrations.fitted_layer import fit_layer
from lln.integrations.kept_softmax import softmax
from lln.integrations.own_attention import refuse_own_attention
from lln.integrations.settings import (
    ATTENTIONS,
    Settings,
    check_mix_of,
    criterion_of,
    kept_offset,
)
from lln.integrations.target import OnStep, TargetSearch, TriedLayer, check_target
from lln.integrations.transformers import name_of_module, register, remember_attention
from lln.integrations.trial_batch import check_inputs, example_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def convert(
    model: PreTrainedModel,
    attention: str | None = None,
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
    keys: int = 64,
    select: str = "block",
    group_size: int | None = None,
    sliding_window: str = "refuse",
    momentum: float = 0.1,
    impl: str = "auto",
    verbose: bool = False,
    on_step: OnStep = lambda part, step, steps: None,
) -> Conversion:
    """Replace the attention of a loaded model, in place.

    Args:
        model: Any model whose layers use transformers' attention interface.
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"`` (exact keys beside the summary, see
            `lln.lln_keys_attention`); None = ``"lln_keys"`` with a target, else ``"lln_diag"``.
        layers: Which attention modules to convert: numbers in the order they run, or names; None =
            all. The others stay softmax.
        calibrate: A batch of the model's inputs, on its device. α and β of every head are found on
            it so that LLN attention is as concentrated as the model's softmax (`lln.calibrate`);
            of ``"lln_keys"`` also the offset (`lln.calibrate_keys`).
        target: How close the converted model has to be to the original on ``calibrate``, as a mean
            cosine of logits, or of the mean hidden state of models without a head: a number
            between 0 and 1. Every layer then gets as few exact keys as that allows, 0 to 256, or
            stays softmax where 256 do not suffice; the model runs at most 30 times to find out.
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
        keys: Of ``"lln_keys"``: how many keys outside its block a group of queries sees.
        select: How they are chosen (see `lln.choose_keys`).
        group_size: Queries that share them; None = a block for ``"block"``, else 1.
        sliding_window: What to do with layers that have one: ``"refuse"``, or ``"softmax"`` to
            leave them as they are.
        momentum: Of ``"running"``.
        impl: As in `lln.lln_attention`.
        verbose: Whether to print the table too, for scripts; a shell or notebook shows it anyhow.
        on_step: With a target: called after every step with the part of the work, the step and how
            many there are at most, for a progress bar.

    Returns:
        What changed, and how far each layer's output and the model's moved; its text is a table.
        With a target also quality against time for other numbers of keys, as ``.target``.

    Raises:
        UnsupportedModelError: If our attention did not run in every layer.
        InvalidInputError: One sentence on what does not fit, also if an earlier conversion has α
            and β that this one would not replace. The model is then as it was.

    Warns:
        CalibrationWarning: If α and β rest on few tokens or are far larger than usual, or if an
            earlier conversion was replaced, or if a target is missed on held-out data.
    """
    register()
    _check_model(model)
    if attention is None:
        attention = "lln_diag" if target is None else "lln_keys"
    check_choice("attention", attention, ATTENTIONS)
    if statistics is None:
        statistics = "sample" if calibrate is None else "fixed"
    if statistics in ("fixed", "learned") and calibrate is None and target is None:
        raise InvalidInputError(
            f"statistics {statistics!r} needs calibrate, inputs to find α and β on."
        )
    earlier = _earlier(model)
    if calibrate is None and earlier is not None and _is_worth_keeping(earlier):
        raise InvalidInputError(
            f"{type(model).__name__} is converted already, and its α, β and joins "
            f"(statistics {earlier.statistics!r}, mix {earlier.mix!r}) would be lost; pass "
            "calibrate, inputs to find new ones on, or convert the original model."
        )
    check_mix_of(attention, mix)
    check_target(model, target, attention, statistics, keys, calibrate, holdout)
    settings = Settings(
        matching=criterion_of(matching, attention),
        statistics=statistics,
        momentum=momentum,
        mix=mix,
        block_size=block_size,
        keys=keys,
        select=select,
        group_size=group_size,
        offset=kept_offset(attention, statistics, calibrate is not None),
        sliding_window=sliding_window,
        impl=impl,
        attached=True,
    )
    given = {"calibrate": calibrate, "batch": batch}
    checked = [check_inputs(name, it, model) for name, it in given.items() if it is not None]
    inputs = checked[0] if checked else example_inputs(model)
    unseen = None if holdout is None else check_inputs("holdout", holdout, model)
    with _undone_on_error(model), _evaluating(model):
        _switch(model, attention)
        surgeon = _Surgeon(model, attention, settings, layers, calibrate is not None)
        if target is not None:
            surgeon.on_layer = partial(on_step, "layers")
        with observed(surgeon.look):
            outputs = model(**inputs)
        surgeon.check()
        report = Conversion(attention, statistics, surgeon.reports)
        if target is not None:
            surgeon.write_settings()
            search = TargetSearch(model, surgeon.tried, target, inputs, outputs, unseen, on_step)
            report.target, report.layers = search.run()
        surgeon.write_settings()
        found, expected = _prove(model, inputs, surgeon), _output(outputs)
        report.moved = relative_change(found, expected, inputs.get("attention_mask"))
    report.replaced = earlier is not None and _is_worth_keeping(earlier)
    report.warn()
    if verbose:
        report.show()
    return report


class _Surgeon:
    """Looks at every attention call of one forward pass and fits LLN attention beside it."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str,
        settings: Settings,
        layers: Sequence[int | str] | None,
        calibrated: bool,
    ) -> None:
        self.model, self.attention, self.settings = model, attention, settings
        self.calibrated = calibrated
        self.wanted = None if layers is None else list(layers)
        self.calls = 0
        self.modules: list[nn.Module] = []
        self.reports: list[LayerReport] = []
        # With a target: every layer with all numbers of keys, and whom to tell of each.
        self.tried: list[TriedLayer] = []
        self.on_layer: Callable[[int, int], object] | None = None
        self.configs: dict[int, Any] = {}
        self.names: dict[int, str] = {}

    def look(self, call: AttentionCall) -> Tensor:
        """Fit what this module will run, and answer with softmax."""
        self.calls += 1
        softmax_out = softmax(call)
        if any(module is call.module for module in self.modules):
            return softmax_out
        name = name_of_module(self.model, call.module)
        number = len(self.modules)
        self.modules.append(call.module)
        self.names[id(call.module)] = name
        config: Any = getattr(call.module, "config", self.model.config)
        self.configs[id(config)] = config
        heads, width = call.query.shape[1], call.query.shape[3]
        stays = LayerReport(name, "softmax", heads, width)
        is_wanted = self._is_wanted(number, name, call)
        if self.on_layer is not None:
            self._try(call, stays, softmax_out, is_wanted)
            return softmax_out
        if not is_wanted:
            attach(call.module, KeptSoftmax())
            self.reports.append(stays)
            return softmax_out
        fitted = self._heads_for(call)
        report = fit_layer(name, fitted, call, softmax_out, self.calibrated)
        attach(call.module, fitted)
        self.reports.append(report)
        return softmax_out

    def _try(
        self, call: AttentionCall, stays: LayerReport, softmax_out: Tensor, is_wanted: bool
    ) -> None:
        """Fit a module with every number of keys, for a search to choose from."""
        assert self.on_layer is not None
        shape = AttentionShape.of(replace(call, settings=self.settings))
        layer = TriedLayer(stays.name, call.module, shape, call.key.shape[2], stays)
        if is_wanted:
            own = replace(call, settings=self.settings)
            layer.fit(lambda keys: self._heads_for(call, keys), own, softmax_out)
        layer.take(None)
        self.tried.append(layer)
        number = len(self.tried)
        self.on_layer(number, max(number, getattr(self.model.config, "num_hidden_layers", 0)))

    def check(self) -> None:
        """Refuse a model of which we saw too little."""
        kind = type(self.model).__name__
        if not self.modules:
            raise UnsupportedModelError(
                f"{kind} does not call transformers' attention interface: it ran without one call "
                "of LLN attention and keeps its own; it cannot be converted."
            )
        expected = getattr(self.model.config, "num_hidden_layers", 0)
        # Calls, not modules: layers may share one.
        if self.calls < expected:
            raise UnsupportedModelError(
                f"LLN attention was called {self.calls} times in {kind}, which has {expected} "
                "layers; the others keep their own attention."
            )
        known = [*range(len(self.modules)), *self.names.values()]
        missing = [layer for layer in self.wanted or [] if layer not in known]
        if missing:
            meant = did_you_mean(missing[0], self.names.values())
            raise InvalidInputError(
                f"layers has {missing[0]!r}, which did not run{meant}; known are 0 to "
                f"{len(self.modules) - 1} and {', '.join(self.names.values())}."
            )

    def write_settings(self) -> None:
        """Note in the configurations what was done, so that it is saved with the model."""
        for config in self.configs.values():
            config.lln = self.settings.as_dict()
        described = {
            self.names[id(module)]: attached.sizes()
            for module in self.modules
            if (attached := attached_to(module)) is not None
        }
        self.model.config.lln = replace(self.settings, layers=described).as_dict()
        remember_attention(self.model)

    def _is_wanted(self, number: int, name: str, call: AttentionCall) -> bool:
        wanted = self.wanted is None or number in self.wanted or name in self.wanted
        if call.window is None or not wanted:
            return wanted
        if self.settings.sliding_window == "softmax" and self.wanted is None:
            return False
        fix = "choose sliding_window 'softmax' to leave such layers as they are."
        raise UnsupportedModelError(
            f"layer {number} ({name}) attends within a sliding window of {call.window} tokens, "
            "which LLN attention does not have; "
            + (fix if self.wanted is None else "leave it out of layers.")
        )

    def _heads_for(self, call: AttentionCall, keys: int | None = None) -> AttachedHeads:
        """α, β and join of one attention module, not fitted yet."""
        heads, width = call.query.shape[1], call.query.shape[3]
        if self.settings.statistics == "sample" and call.is_causal:
            raise InvalidInputError(
                f"{type(self.model).__name__} is causal, and α, β of the sequence itself would "
                "show it the future; "
                + (
                    "choose statistics 'fixed', 'running' or 'learned'."
                    if self.calibrated
                    else "pass calibrate, inputs to find them on."
                )
            )
        fitted = AttachedHeads(
            self.attention,
            heads,
            width,
            call.value.shape[3],
            self.settings,
            keys=keys,
            device=call.query.device,
        )
        fitted.train(call.module.training)
        return fitted


def _prove(model: PreTrainedModel, inputs: dict[str, Tensor], surgeon: _Surgeon) -> Tensor:
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
    return settings.statistics != "sample" or isinstance(settings.mix, str)


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


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode without gradients, and back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in model.modules():
            module.training = training.get(module, model.training)
        for module in model.modules():
            attached = attached_to(module)
            if attached is not None:
                attached.train(module.training)


@contextmanager
def _undone_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Leave the model as it was if anything fails."""
    configs = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            configs[id(config)] = config
    before = [
        (config, config._attn_implementation, getattr(config, "lln", None))
        for config in configs.values()
    ]
    attached = [(module, attached_to(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for config, implementation, settings in before:
            config._attn_implementation_internal = implementation
            if settings is not None:
                config.lln = settings
            elif hasattr(config, "lln"):
                delattr(config, "lln")
        for module, own in attached:
            if ATTRIBUTE in module._modules and isinstance(
                module._modules[ATTRIBUTE], (AttachedHeads, KeptSoftmax)
            ):
                delattr(module, ATTRIBUTE)
            if own is not None:
                module.add_module(ATTRIBUTE, own)
        remember_attention(model)
        raise
