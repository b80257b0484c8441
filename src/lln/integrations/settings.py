"""The settings of a model's LLN attention, as ``config.lln`` keeps them.

``config.lln`` is a plain dictionary, so that it is written to ``config.json`` and read back with
the model. Everything in it is checked here; what is unknown is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from lln import checks
from lln.checks.names import check_choice, did_you_mean
from lln.errors import InvalidInputError
from lln.nn.heads import JOINS
from lln.nn.temperatures import STATISTICS

ATTENTIONS = ("lln", "lln_diag")
# What a saved configuration calls them. Where `register` did not run, transformers quotes the name
# it does not know: that is all a reader of the folder gets to see, so it says what is missing.
SAVED_AS = {
    name: f"{name} (of the package lln; first run: from lln.integrations.transformers import "
    "register; register())"
    for name in ATTENTIONS
}
WINDOWS = ("refuse", "softmax")

# Raised when what is saved changes its meaning; an unknown number is refused on load.
FORMAT = 1

LEARNED_JOINS = tuple(join for join in JOINS if join != "average")


def attention_of(implementation: Any) -> Any:
    """What an ``attn_implementation`` means: a saved name is one of ours, others are themselves."""
    if not isinstance(implementation, str):
        return implementation
    name = implementation.partition(" ")[0]
    return name if name in ATTENTIONS else implementation


@dataclass(frozen=True)
class Settings:
    """How attention layers named ``lln`` or ``lln_diag`` compute.

    Attributes:
        matching: Criterion of moment matching (see `lln.match_moments`).
        statistics: ``"sample"`` or ``"fixed"``; after `convert` also ``"running"``, ``"learned"``.
        alpha: α of ``"fixed"``, a number; a converted model keeps one value per head instead.
        beta: β of ``"fixed"``.
        momentum: Of ``"running"``.
        mix: Weight of the LLN part of ``lln_diag``: a number; after `convert` also a learned join,
            ``"ratio"``, ``"scale"``, ``"gate"`` or ``"heads"`` (see `lln.LLNDiagCore`).
        block_size: Tokens in a diagonal block; None = the head width.
        sliding_window: What layers with a sliding window do: ``"refuse"``, or ``"softmax"`` inside
            the window, as the model was trained.
        impl: As in `lln.lln_attention`.
        attached: Whether `convert` gave every attention module a submodule ``lln`` of its own.
        layers: By name, the sizes of those submodules (see `lln.integrations.attached`).
        format: Version of this dictionary.
    """

    matching: str = "variance"
    statistics: str = "sample"
    alpha: float | None = None
    beta: float | None = None
    momentum: float = 0.1
    mix: float | str = 0.5
    block_size: int | None = None
    sliding_window: str = "refuse"
    impl: str = "auto"
    attached: bool = False
    layers: dict[str, dict[str, Any]] | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Refuse what cannot be met."""
        if self.format != FORMAT:
            raise InvalidInputError(
                f"config.lln has format {self.format}, this version of lln reads {FORMAT}; "
                "convert the original model again."
            )
        checks.check_matching(self.matching)
        checks.check_impl(self.impl)
        check_choice("statistics", self.statistics, STATISTICS)
        check_choice("sliding_window", self.sliding_window, WINDOWS)
        if self.block_size is not None:
            checks.check_block_size(self.block_size)
        if isinstance(self.mix, str):
            if self.mix not in LEARNED_JOINS:
                known = ", ".join(map(repr, LEARNED_JOINS))
                meant = did_you_mean(self.mix, LEARNED_JOINS)
                raise InvalidInputError(
                    f"mix must be a number or one of {known}, got {self.mix!r}{meant}."
                )
        elif isinstance(self.mix, bool) or not 0 <= self.mix <= 1:
            raise InvalidInputError(f"mix must be a number in [0, 1], got {self.mix!r}.")
        if not self.attached:
            self._check_stateless()

    def _check_stateless(self) -> None:
        """A plain function has no module to keep statistics or parameters in."""
        for name, found, stateless in (
            ("statistics", self.statistics, self.statistics in ("sample", "fixed")),
            ("mix", self.mix, not isinstance(self.mix, str)),
        ):
            if not stateless:
                raise InvalidInputError(
                    f"{name}={found!r} needs a module to live in: use "
                    f"lln.integrations.convert.convert(model, {name}={found!r}, ...)."
                )
        if self.statistics == "fixed" and (self.alpha is None or self.beta is None):
            raise InvalidInputError(
                "statistics='fixed' needs config.lln['alpha'] and config.lln['beta']; "
                "lln.integrations.convert.convert(model, calibrate=batch) finds them per head."
            )

    @classmethod
    def of(cls, config: object) -> Settings:
        """The settings a configuration holds; defaults where it holds none.

        Args:
            config: A transformers configuration, or anything with an attribute ``lln``.
        """
        found = getattr(config, "lln", None)
        if found is None:
            return _DEFAULTS
        if not isinstance(found, dict):
            raise InvalidInputError(
                f"config.lln must be a dictionary of settings, got {type(found).__name__}."
            )
        unknown = sorted(set(found) - _NAMES)
        if unknown:
            said = ", ".join(f"{name}{did_you_mean(name, _NAMES)}" for name in unknown)
            raise InvalidInputError(
                f"config.lln has unknown settings {said}; known are {', '.join(sorted(_NAMES))}."
            )
        return cls(**found)

    def as_dict(self) -> dict[str, Any]:
        """What to keep in ``config.lln``."""
        return asdict(self)


_NAMES = frozenset(field.name for field in fields(Settings))
_DEFAULTS = Settings()
