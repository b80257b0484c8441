"""Converts a model whose attention modules call ``scaled_dot_product_attention``.

As `lln.integrations.surgeon` does for Hugging Face models: the model is run once, and LLN attention
is fitted beside the softmax of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.attached import ATTRIBUTE, AttachedHeads, KeptSoftmax, attached_to
from lln.integrations.attention_call import AttentionCall
from lln.integrations.conversion_report import Conversion, LayerReport, relative_change
from lln.integrations.eval_mode import evaluating
from lln.integrations.fitted_layer import fit_layer
from lln.integrations.kept_softmax import softmax
from lln.integrations.sdpa import AnsweredHeads, attach, call_of, callers_seen, describe
from lln.integrations.searches import OnStep, Run, Search
from lln.integrations.settings import Settings


class CallSurgeon:
    """Converts one model in place, as `lln.integrations.surgeon.Surgeon`.

    ``run`` is the model as a function of a batch; its outputs are a dictionary.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        attention: str,
        settings: Settings,
        layers: Sequence[int | str] | None,
        calibrated: bool,
        search: Search | None,
    ) -> None:
        """Refuse a model that is converted already."""
        if describe(model):
            raise InvalidInputError(f"{type(model).__name__} is converted already; load it anew.")
        self.model, self.run, self.attention, self.settings = model, run, attention, settings
        self.layers, self.calibrated, self.search = layers, calibrated, search
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seen: list[nn.Module] = []
        self.fitted: list[tuple[nn.Module, AnsweredHeads]] = []
        self.reports: list[LayerReport] = []
        self.on_layer: Callable[[int, int], object] = lambda done, of: None
        self.handles: list[RemovableHandle] = []

    def convert(
        self, inputs: dict[str, Tensor], holdout: dict[str, Tensor] | None, on_step: OnStep
    ) -> Conversion:
        """Fit every layer, attach what is chosen, and say what changed.

        A search is verified on ``holdout``.
        """
        self.on_layer = partial(on_step, "layers")
        with evaluating(self.model):
            try:
                with callers_seen(self.model, self._look):
                    expected = self.run(inputs)
                self._check()
                report = Conversion(self.attention, self.settings.statistics, self.reports)
                if self.search is None:
                    for module, heads in self.fitted:
                        self._attach(module, heads)
                else:
                    report.target, report.layers = self.search.run(
                        self.run, self._attach, inputs, expected, holdout, on_step
                    )
                report.moved = relative_change(_first(self.run(inputs)), _first(expected))
            except BaseException:
                self._undo()
                raise
        return report

    def _look(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Fit what a module will run, and answer with softmax."""
        call = call_of(module, self.attention, self.settings, None, *args, **kwargs)
        out = softmax(call)
        if any(module is other for other in self.seen):
            return out
        number, name = len(self.seen), self.names[id(module)]
        if number == 0:
            self._tell(0)
        self.seen.append(module)
        stays = LayerReport(name, "softmax", call.query.shape[1], call.query.shape[3])
        is_wanted = self.layers is None or number in self.layers or name in self.layers
        if self.search is not None:
            make = partial(self._heads_for, call) if is_wanted else None
            self.search.add(call, stays, make, out)
        elif is_wanted:
            heads = self._heads_for(call)
            self.reports.append(fit_layer(name, heads, call, out, self.calibrated))
            self.fitted.append((module, heads))
        else:
            self.reports.append(stays)
        self._tell(number + 1)
        return out

    def _tell(self, done: int) -> None:
        self.on_layer(done, max(done, len(getattr(self.model, "blocks", ())), 1))

    def _heads_for(self, call: AttentionCall, keys: int | None = None) -> AnsweredHeads:
        """α, β and join of one module, not fitted yet."""
        _, heads, _, width = call.query.shape
        sizes = (heads, width, call.value.shape[3])
        options = {"keys": keys, "device": call.query.device}
        own = AnsweredHeads(self.attention, *sizes, self.settings, **options)
        return own.eval()

    def _check(self) -> None:
        """Refuse a model without calls, and layers that made none."""
        known = [*range(len(self.seen)), *(self.names[id(module)] for module in self.seen)]
        missing = [layer for layer in self.layers or [] if layer not in known]
        if not self.seen or missing:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} never calls scaled_dot_product_attention in "
                f"{missing[0] if missing else 'any module'}; nothing was converted."
            )

    def _attach(self, module: nn.Module, attached: AttachedHeads | KeptSoftmax) -> None:
        self.handles += attach(module, attached)

    def _undo(self) -> None:
        """Leave the model as it was."""
        for handle in self.handles:
            handle.remove()
        for module in self.seen:
            if attached_to(module) is not None:
                delattr(module, ATTRIBUTE)


def _first(outputs: dict[str, Tensor]) -> Tensor:
    return next(iter(outputs.values()))
