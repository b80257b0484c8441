"""What a conversion did, layer by layer, as a table."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from lln.errors import CalibrationWarning
from lln.matching.calibration import doubts
from lln.matching.key_calibration import doubts_of_length
from lln.matching.page_index import doubts_of_projections

if TYPE_CHECKING:
    from rich.console import Console

# ‖converted − original‖ / ‖original‖ from which on a model is another one until it is trained.
_FAR = 0.3


class PagesSeen(NamedTuple):
    """What a query of a module with pages sees, as `lln.page_attention` counts it."""

    pages: int
    page_size: int
    window: int
    sinks: int
    rank: int

    def __str__(self) -> str:
        """In words."""
        sinks = f"{self.sinks} sinks, " if self.sinks else ""
        return f"window {self.window}, {sinks}pages {self.pages}×{self.page_size}, rank {self.rank}"


@dataclass(frozen=True)
class LayerReport:
    """One attention module.

    Attributes:
        name: In the base model.
        attention: ``"lln"``, ``"lln_diag"``, ``"lln_keys"``, or what the module keeps:
            ``"softmax"``, or ``"window"``, softmax within a sliding window.
        heads: H.
        width: D.
        alpha: Smallest and largest over the heads; None where every sample has its own.
        beta: Likewise.
        moved: ‖LLN − softmax‖ / ‖softmax‖ of this module's output on the same inputs.
        tokens: Tokens that α and β of a head were found on; None = they were not calibrated.
        sharp: Heads with α and β far larger than usual (`lln.matching.calibration.unusual`).
        offset: Of ``"lln_keys"``: smallest and largest of the heads that have slots; None where
            every sample has its own.
        no_rest: Of ``"lln_keys"``: heads that are nearer to softmax without slots and have none.
        keys: Of ``"lln_keys"``: how many keys outside its block a group of queries sees exactly.
        block_size: Of ``"lln_keys"``: tokens in a block.
        longest: Of ``"lln_keys"``: tokens of the longest sequence that the offset was found on;
            None = it was not.
        pages: Of ``"lln_keys"`` with pages: what a query sees; it has neither α nor β.
    """

    name: str
    attention: str
    heads: int
    width: int
    alpha: tuple[float, float] | None = None
    beta: tuple[float, float] | None = None
    moved: float = 0.0
    tokens: int | None = None
    sharp: int = 0
    offset: tuple[float, float] | None = None
    no_rest: int = 0
    keys: int | None = None
    block_size: int | None = None
    longest: int | None = None
    pages: PagesSeen | None = None

    @property
    def is_kept(self) -> bool:
        """Whether it gives what the original gave."""
        return self.attention in ("softmax", "window")


class Found(Protocol):
    """What a conversion to a target found (`lln_lab.conversion.target_report`)."""

    @property
    def choice(self) -> dict[str, int | None]:
        """Keys of every layer by its name; None = softmax."""
        ...

    def notes(self) -> list[str]:
        """What should not be overlooked, in sentences."""
        ...

    def write(self, path: str | Path) -> None:
        """Write everything as JSON."""

    def show(self, console: Console) -> None:
        """Print the table of quality against time, and what it means."""


@dataclass(repr=False)
class Conversion:
    """What `convert` did; shown as a table.

    Attributes:
        attention: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``.
        statistics: Where α and β come from.
        layers: One entry per attention module, in the order they run.
        moved: ‖converted − original‖ / ‖original‖ of the model's output on the batch.
        replaced: Whether an earlier conversion was replaced, with its α, β and joins.
        target: Of a conversion to a target: quality against time, and the choice.
        or_softmax: Whether calls that are sooner with softmax itself run that.
    """

    attention: str
    statistics: str
    layers: list[LayerReport] = field(default_factory=list)
    moved: float = 0.0
    replaced: bool = False
    target: Found | None = None
    or_softmax: bool = False

    def __str__(self) -> str:
        """The table as plain text."""
        return self.render(width=100)

    # An interactive Python shows what a call returns.
    __repr__ = __str__

    @property
    def tokens(self) -> int | None:
        """Tokens that α and β were found on, in the layer with the fewest; None = none were."""
        return min(
            (layer.tokens for layer in self.layers if layer.tokens is not None), default=None
        )

    @property
    def pages(self) -> PagesSeen | None:
        """What a query of a layer with pages sees; None = there are none."""
        return next((layer.pages for layer in self.layers if layer.pages is not None), None)

    def notes(self) -> list[str]:
        """What should not be overlooked, in sentences."""
        found = []
        if self.replaced:
            found.append("the model was converted before: its α, β and joins were replaced.")
        if self.moved > _FAR:
            nearer = "convert with attention 'lln_keys', which stays closer"
            if self.attention == "lln_keys":
                nearer = "convert with more keys or a target (target=0.99, --target 0.99)"
            if self.pages is not None:
                nearer = f"convert with more pages (pages={2 * self.pages.pages})"
            found.append(
                f"the model's output moved by {self.moved:.0%}: {nearer}, or train the model "
                "before you use it (lln recover)."
            )
        if self.tokens is not None and self.pages is not None:
            found += doubts_of_projections(self.tokens, self.pages.rank)
        elif self.tokens is not None:
            sharp = [layer for layer in self.layers if layer.sharp]
            most = [
                max((side[1] for layer in sharp if (side := getattr(layer, name))), default=0.0)
                for name in ("alpha", "beta")
            ]
            heads = sum(layer.heads for layer in self.layers if layer.tokens is not None)
            found += doubts(self.tokens, sum(layer.sharp for layer in sharp), heads, *most)
            found += self._doubts_of_length()
        return found if self.target is None else found + self.target.notes()

    def _doubts_of_length(self) -> list[str]:
        """At most one, of the layer with the fewest keys."""
        lengths = [
            (layer.longest, layer.block_size, layer.keys)
            for layer in self.layers
            if layer.longest is not None
            and layer.block_size is not None
            and layer.keys is not None
            and not layer.is_kept
        ]
        return doubts_of_length(*min(lengths, key=lambda one: one[2])) if lengths else []

    def warn(self, stacklevel: int = 2) -> None:
        """Issue the notes as warnings."""
        for note in self.notes():
            warnings.warn(note, CalibrationWarning, stacklevel=stacklevel + 1)

    def show(self) -> None:
        """Print the table, as wide as the terminal."""
        from rich.console import Console

        console = Console()
        console.print(self.render(console.width), highlight=False)

    def render(self, width: int = 100) -> str:
        """The table in lines of at most ``width`` characters."""
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("layer", no_wrap=True)
        titles = ("α", "β", "keys", "offset") if self.attention == "lln_keys" else ("α", "β")
        if self.pages is not None:
            titles = ("a query sees",)
        for title in ("attention", "heads", *titles, "moved"):
            table.add_column(title, justify="right" if title != "attention" else "left")
        for layer in self.layers:
            table.add_row(
                layer.name,
                layer.attention,
                f"{layer.heads}×{layer.width}",
                *_numbers(layer, titles),
                "" if layer.is_kept else f"{layer.moved:.1%}",
            )
        stream = StringIO()
        console = Console(file=stream, width=width)
        console.print(table)
        changed = sum(not layer.is_kept for layer in self.layers)
        near = sum(layer.attention == "window" for layer in self.layers)
        exact = f"; {near} attend within their windows, exactly as before" if near else ""
        found = "α, β and offset" if self.attention == "lln_keys" else "α and β"
        if self.pages is not None:
            found = "projections"
        end = ". Calls that are sooner with softmax itself run that." if self.or_softmax else "."
        behind = "" if self.tokens is None else f", {found} from {self.tokens} tokens"
        console.print(
            f"{changed} of {len(self.layers)} attention layers run {self.attention}, statistics "
            f"{self.statistics}{behind}{exact}; the model's output moved by {self.moved:.1%}{end}",
            highlight=False,
        )
        if self.target is not None:
            console.print()
            self.target.show(console)
        for note in self.notes():
            console.print(f"Note: {note}", highlight=False)
        return stream.getvalue()


def relative_change(found: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """‖found − expected‖ / ‖expected‖ over the valid tokens.

    Args:
        found: ``[B, T, ...]``.
        expected: Likewise.
        mask: bool ``[B, T]``; None or another shape = all.
    """
    found, expected = found.detach().double(), expected.detach().double()
    if mask is not None and mask.shape == found.shape[:2]:
        found, expected = found[mask.bool()], expected[mask.bool()]
    size = torch.linalg.vector_norm(expected)
    return (torch.linalg.vector_norm(found - expected) / size.clamp_min(1e-30)).item()


def span(values: Tensor) -> tuple[float, float]:
    """Smallest and largest."""
    return values.min().item(), values.max().item()


def _numbers(layer: LayerReport, titles: tuple[str, ...]) -> tuple[str, ...]:
    """What a row says of a layer, in as many columns."""
    if len(titles) == 1:
        return ("" if layer.pages is None else str(layer.pages),)
    both = (_span(layer.alpha, layer), _span(layer.beta, layer))
    if "offset" not in titles:
        return both
    without = f", {layer.no_rest} none" if layer.no_rest else ""
    offset = _span(layer.offset, layer) + without
    keys = "" if layer.keys is None else str(layer.keys)
    return *both, keys, "no slots" if layer.no_rest == layer.heads else offset


def _span(values: tuple[float, float] | None, layer: LayerReport) -> str:
    if layer.is_kept:
        return ""
    return "sample" if values is None else f"{values[0]:.2f}–{values[1]:.2f}"
