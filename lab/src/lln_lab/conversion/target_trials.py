"""The trials of a conversion to a target, and what they found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln.errors import InvalidInputError
from lln.integrations.conversion_report import LayerReport
from lln.integrations.searches import Attach, OnStep, Run
from lln_lab.conversion.attention_cost import LENGTHS, AttentionShape, measure_calls
from lln_lab.conversion.key_budget import MOST_RUNS, Choice, Trials, choose_budget
from lln_lab.conversion.output_quality import compared, quality
from lln_lab.conversion.target_report import LayerChoice, ParetoRow, TargetReport
from lln_lab.conversion.tried_layer import TriedLayer


class TargetTrials:
    """Finds the keys of every layer of a model.

    Args:
        run: The model, whose layers ask for our attention; in eval mode, without gradients.
        attach: How a module gets what was chosen.
        layers: All of them.
        target: Quality to reach.
        inputs: The batch to search on.
        expected: What the original made of it.
        holdout: The batch to verify on.
        on_step: Told of every step.
    """

    def __init__(
        self,
        run: Run,
        attach: Attach,
        layers: Sequence[TriedLayer],
        target: float,
        inputs: dict[str, Tensor],
        expected: Any,
        holdout: dict[str, Tensor] | None,
        on_step: OnStep,
    ) -> None:
        """Refuse what cannot be searched."""
        self.outputs_of, self.attach = run, attach
        self.layers, self.target = list(layers), target
        self.inputs, self.expected, self.holdout = inputs, expected, holdout
        self.on_step = on_step
        self.tried = [layer for layer in self.layers if layer.fits]
        if not self.tried:
            raise InvalidInputError(
                "target has no layer to choose keys for: all of them stay softmax; leave layers "
                "out, or name some that exist."
            )
        if not math.isfinite(quality(expected, expected, inputs)):
            raise InvalidInputError(
                "target needs a finite output to compare with, and the original's on calibrate "
                "has NaN or infinity."
            )

    def run(self) -> tuple[TargetReport, list[LayerReport]]:
        """Choose, attach what was chosen, and say what was found."""
        ladder = list(self._common_ladder())
        damage = [{keys: layer.fits[keys][1].moved ** 2 for keys in ladder} for layer in self.tried]
        trials = Trials(self._quality, told=lambda runs: self.on_step("search", runs, MOST_RUNS))
        choice = choose_budget(damage, self._price, trials, self.target)
        self.on_step("search", MOST_RUNS, MOST_RUNS)
        uniform: list[Choice] = [(keys,) * len(self.tried) for keys in ladder]
        shown_choices: list[tuple[str, Choice]] = [
            ("softmax", (None,) * len(self.tried)),
            *((f"K = {keys}", same) for keys, same in zip(ladder, uniform, strict=True)),
            ("choice", choice),
        ]
        times = self._times(ladder)
        unseen = self._unseen([one for _, one in shown_choices])
        rows = [
            ParetoRow(
                name,
                trials.quality(one) or 0.0,
                unseen.get(one),
                _shares(self.layers, self._all(one)),
                self._measured(one, times),
            )
            for name, one in shown_choices
        ]
        reports = self._take(choice)
        found = [
            LayerChoice(
                layer.name,
                keys,
                {tried: report.moved for tried, (_, report) in layer.fits.items()},
                _shares([layer], [keys]),
                {
                    tokens: _milliseconds(seconds)
                    for tokens, seconds in times[layer.shape, keys].items()
                },
            )
            for layer, keys in zip(self.layers, self._all(choice), strict=True)
        ]
        report = TargetReport(
            target=self.target,
            compared=compared(self.expected),
            tokens=self.tried[0].tokens,
            # One more for the original, and one that proves the conversion.
            runs=len(trials.known) + 2,
            device=_device_name(self.tried[0].shape.device),
            layers=found,
            rows=rows,
            all_exact=all(
                layer.tokens <= layer.shape.block_size + min(ladder) for layer in self.tried
            ),
        )
        return report, reports

    def _common_ladder(self) -> tuple[int, ...]:
        """The numbers of keys that every layer was fitted with; layers may differ in length."""
        ladders = [tuple(layer.fits) for layer in self.tried]
        return tuple(keys for keys in ladders[0] if all(keys in other for other in ladders))

    def _price(self, index: int, keys: int | None) -> float:
        layer = self.tried[index]
        return layer.shape.operations(layer.tokens, keys)

    def _take(self, choice: Choice) -> list[LayerReport]:
        """Give every layer what was chosen for it."""
        pairs = zip(self.layers, self._all(choice), strict=True)
        return [layer.take(keys, self.attach) for layer, keys in pairs]

    def _quality(self, choice: Choice) -> float:
        self._take(choice)
        found = quality(self.outputs_of(self.inputs), self.expected, self.inputs)
        return found if math.isfinite(found) else 0.0

    def _unseen(self, choices: list[Choice]) -> dict[Choice, float]:
        """The quality of every choice on held-out data."""
        if self.holdout is None:
            return {}
        found: dict[Choice, float] = {}
        self._take((None,) * len(self.tried))
        expected = self.outputs_of(self.holdout)
        for number, choice in enumerate(choices):
            self._take(choice)
            found[choice] = quality(self.outputs_of(self.holdout), expected, self.holdout)
            self.on_step("held out", number + 1, len(choices))
        return found

    def _times(
        self, ladder: list[int]
    ) -> dict[tuple[AttentionShape, int | None], dict[int, float | None]]:
        """Seconds of one layer's attention, for every shape of layer and number of keys."""
        shapes = list(dict.fromkeys(layer.shape for layer in self.layers))
        # Layers with windows keep them.
        choices = {shape: (None, *(ladder if shape.window is None else ())) for shape in shapes}
        cells = [(shape, keys) for shape, own in choices.items() for keys in own]
        found: dict[tuple[AttentionShape, int | None], dict[int, float | None]] = {}
        for number, (shape, keys) in enumerate(cells):
            found[shape, keys] = measure_calls(shape, keys)
            self.on_step("timing", number + 1, len(cells))
        return found

    def _all(self, choice: Choice) -> list[int | None]:
        """The keys of all layers, also of those that were left out."""
        chosen = dict(zip((id(layer) for layer in self.tried), choice, strict=True))
        return [chosen.get(id(layer)) for layer in self.layers]

    def _measured(
        self,
        choice: Choice,
        times: dict[tuple[AttentionShape, int | None], dict[int, float | None]],
    ) -> dict[int, float | None]:
        pairs = list(zip(self.layers, self._all(choice), strict=True))
        found: dict[int, float | None] = {}
        for tokens in LENGTHS:
            cells = [times[layer.shape, keys][tokens] for layer, keys in pairs]
            known = [cell for cell in cells if cell is not None]
            found[tokens] = _milliseconds(sum(known) if len(known) == len(cells) else None)
        return found


def _shares(layers: Sequence[TriedLayer], choice: Sequence[int | None]) -> dict[int, float]:
    """Operations of some layers by tokens, softmax's = 1."""
    return {
        tokens: sum(
            layer.shape.operations(tokens, keys) for layer, keys in zip(layers, choice, strict=True)
        )
        / sum(layer.shape.operations(tokens, None) for layer in layers)
        for tokens in LENGTHS
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads != 1)}"
