"""Fits LLN attention beside the softmax of every layer, while a model runs once.

`lln.integrations.convert` drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lln.checks.names import did_you_mean
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.attached import AttachedHeads, KeptSoftmax, attach, attached_to
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import LayerReport
from lln.integrations.fitted_layer import fit_layer
from lln.integrations.kept_softmax import softmax
from lln.integrations.searches import Search
from lln.integrations.settings import Settings
from lln.integrations.transformers import name_of_module, remember_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def has_rotations(model: PreTrainedModel) -> bool:
    """Whether the tokens of a text know their places by rotations of queries and keys.

    Configurations say so in many ways; all models of transformers have a module of that name.
    """
    names = (type(module).__name__.lower() for module in model.modules())
    return model.main_input_name == "input_ids" and any("rotary" in name for name in names)


class Surgeon:
    """Looks at every attention call of one forward pass and fits LLN attention beside it."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str,
        settings: Settings,
        layers: Sequence[int | str] | None,
        calibrated: bool,
        on_layer: Callable[[int, int], object],
        search: Search | None,
    ) -> None:
        """Nothing is fitted yet.

        Args:
            model: Its layers will be looked at.
            attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
            settings: Of the layers.
            layers: Numbers or names of those to convert; None = all.
            calibrated: Whether α and β are found on the batch.
            on_layer: Told before the first layer and after each how many are done, and of how many.
            search: Given every layer to choose keys for, if there is a target.
        """
        self.model, self.attention, self.settings = model, attention, settings
        self.calibrated = calibrated
        self.wanted = None if layers is None else list(layers)
        self.calls = 0
        self.modules: list[nn.Module] = []
        self.reports: list[LayerReport] = []
        self.on_layer, self.search = on_layer, search
        self.configs: dict[int, Any] = {}
        self.names: dict[int, str] = {}

    def look(self, call: AttentionCall) -> Tensor:
        """Fit what this module will run, and answer with softmax."""
        self.calls += 1
        softmax_out = softmax(call)
        if any(module is call.module for module in self.modules):
            return softmax_out
        number = len(self.modules)
        if number == 0:
            self._tell(0)
            self._choose_form(call)
        name = name_of_module(self.model, call.module)
        self.modules.append(call.module)
        self.names[id(call.module)] = name
        config: Any = getattr(call.module, "config", self.model.config)
        self.configs[id(config)] = config
        attention = "softmax" if call.window is None else "window"
        stays = LayerReport(name, attention, call.query.shape[1], call.query.shape[3])
        is_wanted = self._is_wanted(number, name, call)
        if is_wanted and self.search is None:
            fitted = self._heads_for(call)
            self.reports.append(fit_layer(name, fitted, call, softmax_out, self.calibrated))
            attach(call.module, fitted)
        else:
            attach(call.module, KeptSoftmax())
            self.reports.append(stays)
        if self.search is not None:
            own = replace(call, settings=self.settings)
            make = partial(self._heads_for, own) if is_wanted else None
            self.search.add(own, stays, make, softmax_out)
        self._tell(number + 1)
        return softmax_out

    def _choose_form(self, call: AttentionCall) -> None:
        """Pages or blocks, by the first layer that runs; a search for keys needs blocks."""
        is_free = self.search is None and not self.model.config.is_encoder_decoder
        asked = self.settings.pages
        if self.search is not None and (asked or call.is_causal):
            raise InvalidInputError(
                "target chooses how many keys a block sees, and this model gets pages, which come "
                "closer; leave target out and give pages."
            )
        is_rotary = is_free and has_rotations(self.model)
        self.settings = self.settings.of_model(is_free and call.is_causal, is_rotary)

    def _tell(self, done: int) -> None:
        self.on_layer(done, max(done, getattr(self.model.config, "num_hidden_layers", 0), 1))

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

    def write_settings(self, or_softmax: bool = False) -> None:
        """Note in the configurations what was done, so that it is saved with the model."""
        self.settings = replace(self.settings, or_softmax=or_softmax)
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
        if self.wanted is None:
            # Exact and linear as it is.
            return False
        raise UnsupportedModelError(
            f"layer {number} ({name}) attends within a sliding window of {call.window} tokens, "
            "which stays exact in linear time; leave it out of layers."
        )

    def _heads_for(self, call: AttentionCall, keys: int | None = None) -> AttachedHeads:
        """α, β and join of one attention module, not fitted yet."""
        if self.settings.convolution and (call.is_causal or self.model.config.is_encoder_decoder):
            raise InvalidInputError(
                f"convolution does not take {type(self.model).__name__}: a causal model's cache "
                "would have to keep the last values, and cross attention has no neighbours; leave "
                "it 0."
            )
        is_decoder = call.is_causal and self.model.config.is_encoder_decoder
        is_cross = is_decoder or call.query.shape[2] != call.key.shape[2]
        if self.attention == "lln_keys" and is_cross:
            raise InvalidInputError(
                f"{type(self.model).__name__} has cross attention, whose queries and keys have no "
                "common positions for exact keys; choose attention 'lln'."
            )
        is_paged = self.attention == "lln_keys" and bool(self.settings.pages)
        if self.attention == "lln_keys" and call.is_causal and not is_paged:
            raise InvalidInputError(
                f"{type(self.model).__name__} is causal, and blocks, exact keys and slots look "
                "both ways; leave pages, keys, block_size and group_size out for the pages of "
                "lln.page_attention."
            )
        if self.settings.statistics == "sample" and call.is_causal and not is_paged:
            raise InvalidInputError(
                f"{type(self.model).__name__} is causal, and α, β of the sequence itself would "
                "show it the future; "
                + (
                    "choose statistics 'fixed', 'running' or 'learned'."
                    if self.calibrated
                    else "pass calibrate, inputs to find them on."
                )
            )
        sizes = (call.query.shape[1], call.query.shape[3], call.value.shape[3])
        counts = {"keys": keys, "key_heads": call.key.shape[1] if is_paged else None}
        options: dict[str, Any] = {"device": call.query.device, **counts}
        fitted = AttachedHeads(self.attention, *sizes, self.settings, **options)
        return fitted.train(call.module.training)
