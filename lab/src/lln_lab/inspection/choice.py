"""Which heads are shown in detail."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lln.errors import InvalidInputError
from lln_lab.inspection.study import Study


@dataclass(frozen=True)
class Chosen:
    """A head and why it is shown."""

    layer: int
    head: int
    why: str

    @property
    def name(self) -> str:
        """``layer.head``."""
        return f"{self.layer}.{self.head}"


def parse_heads(given: str | None) -> list[tuple[int, int]] | None:
    """``"0.3,5.11"`` as ``[(0, 3), (5, 11)]``; None = no heads were given.

    Raises:
        InvalidInputError: If the text has another form.
    """
    if given is None:
        return None
    heads = []
    for part in filter(None, re.split(r"[,\s]+", given)):
        found = re.fullmatch(r"(\d+)[.:](\d+)", part)
        if found is None:
            raise InvalidInputError(
                f"--heads takes LAYER.HEAD separated by commas, such as 0.3,5.11, got {part!r}."
            )
        heads.append((int(found[1]), int(found[2])))
    return heads or None


def refuse_missing_heads(asked: list[tuple[int, int]] | None, heads: list[int]) -> None:
    """Refuse heads that a model does not have; ``heads`` is their number per layer.

    Raises:
        InvalidInputError: Names the first of them.
    """
    for layer, head in asked or ():
        if layer >= len(heads):
            raise InvalidInputError(
                f"--heads {layer}.{head} does not exist: layers are 0 to {len(heads) - 1}."
            )
        if head >= heads[layer]:
            raise InvalidInputError(
                f"--heads {layer}.{head} does not exist: heads of layer {layer} are 0 to "
                f"{heads[layer] - 1}."
            )


def choose_heads(study: Study, asked: list[tuple[int, int]] | None) -> list[Chosen]:
    """The heads asked for, or the extremes in entropy and in normality.

    Raises:
        InvalidInputError: If a head that was asked for does not exist.
    """
    if asked is not None:
        refuse_missing_heads(asked, [layer.heads for layer in study.layers])
        return [
            Chosen(layer, head, "as asked") for layer, head in asked if study.layers[layer].shapes
        ]
    found: dict[tuple[int, int], Chosen] = {}
    for name, pick, why in (
        ("entropy", min, "the sharpest"),
        ("entropy", max, "the flattest"),
        ("log_normality.ks", min, "the most normal"),
        ("log_normality.ks", max, "the least normal"),
    ):
        cells = study.cells(name, "log_normality.variance")
        if cells:
            layer, head, _ = pick(cells, key=lambda cell: cell[2][0])
            earlier = found.get((layer, head))
            why = f"{earlier.why}, {why}" if earlier else why
            found[layer, head] = Chosen(layer, head, why)
    return list(found.values())
