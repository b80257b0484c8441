"""The settings of a model's LLN attention, as ``config.lln`` keeps them.

``config.lln`` is a plain dictionary, so that it is written to ``config.json`` and read back with
the model. Everything in it is checked here; what is unknown is refused, never ignored.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from operator import is_
from typing import Any

from lln import checks
from lln.checks.key_options import KEYS_MATCHING, check_group_size
from lln.checks.names import check_choice, did_you_mean, shown
from lln.checks.schema import fault
from lln.errors import InvalidInputError
from lln.nn.heads import JOINS
from lln.nn.temperatures import STATISTICS
from lln.tracing import is_compiling

ATTENTIONS = ("lln", "lln_diag", "lln_keys")
# Those whose past has a fixed size; exact keys may be any of the past.
SUMMARISED = ("lln", "lln_diag")
# What a saved configuration calls them. Where `register` did not run, transformers quotes the name
# it does not know: that is all a reader of the folder gets to see, so it says what is missing.
SAVED_AS = {
    name: f"{name} (of the package lln; first run: from lln.integrations.transformers import "
    "register; register())"
    for name in ATTENTIONS
}
KEPT_OFFSETS = ("fixed", "learned")

# Tokens in a block of ``lln_keys``, and keys outside of it, unless told otherwise.
KEYS_BLOCK, KEYS = 64, 64
# What ``lln_keys`` sees in its form with pages, unless told otherwise; measured in
# docs/tutorials/decoder.md. Encoders look both ways and rest on no first token.
CAUSAL_PAGES = {"pages": 32, "page_size": 16, "window": 127, "sinks": 16}
OTHER_PAGES = CAUSAL_PAGES | {"window": 64, "sinks": 0}

# Raised when what is saved changes its meaning; an unknown number is refused on load.
FORMAT = 1

# Types of the entries whose values are checked further where they are used.
_TYPES = {
    "alpha": (Real, type(None)),
    "beta": (Real, type(None)),
    "momentum": Real,
    "or_softmax": bool,
    "attached": bool,
    "layers": (dict, type(None)),
    "format": int,
}
_PAGE_SIZES = {"pages": 0, "page_size": 1, "window": 0, "sinks": 0, "rank": 1}
_OF_BLOCKS = ("block_size", "group_size")
_KEPT_SOFTMAX = {"softmax": True}
_HEADS = {
    "attention": frozenset(ATTENTIONS),
    "num_heads": int,
    "head_dim": int,
    "value_dim": int,
    "keys?": (int, None),
    "key_heads?": (int, None),
}
# No model has as many; a configuration that lists them would only take long to read.
_MOST_LAYERS = 10_000

LEARNED_JOINS = tuple(join for join in JOINS if join != "average")


def attention_of(implementation: Any) -> Any:
    """What an ``attn_implementation`` means: a saved name is one of ours, others are themselves."""
    if not isinstance(implementation, str):
        return implementation
    name = implementation.partition(" ")[0]
    return name if name in ATTENTIONS else implementation


def criterion_of(matching: str | None, attention: str) -> str:
    """What α and β of an attention are matched by, if the criterion may be left out."""
    return matching or ("rest" if attention == "lln_keys" else "variance")


@dataclass(frozen=True)
class Settings:
    """How attention layers named ``lln``, ``lln_diag`` or ``lln_keys`` compute.

    Most are arguments of `lln.integrations.convert.convert`, which says what they are. Without a
    conversion ``statistics`` is ``"sample"`` or ``"fixed"``, ``mix`` a number, ``convolution`` 0.

    Attributes:
        alpha: α of ``"fixed"``, a number; a converted model keeps one value per head instead.
        beta: β of ``"fixed"``.
        pages: As in `convert`; None is for it to decide.
        offset: What puts the slots on the scale of softmax scores: a number; None = the closed
            form in every call; after `convert` also ``"fixed"`` or ``"learned"``, per head.
        or_softmax: As in `convert`, which sets it; ended by training.
        attached: Whether `convert` gave every attention module a submodule ``lln`` of its own.
        layers: By name, the sizes of those submodules (see `lln.integrations.attached`).
        format: Version of this dictionary.
    """

    matching: str | None = None
    statistics: str = "sample"
    alpha: float | None = None
    beta: float | None = None
    momentum: float = 0.1
    mix: float | str = 0.5
    block_size: int | None = None
    keys: int = KEYS
    group_size: int | None = None
    pages: int | None = 0
    page_size: int | None = None
    window: int | None = None
    sinks: int | None = None
    rank: int | None = None
    offset: float | str | None = None
    convolution: int = 0
    impl: str = "auto"
    or_softmax: bool = False
    attached: bool = False
    layers: dict[str, dict[str, Any]] | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Refuse what cannot be met."""
        for name, types in _TYPES.items():
            if not isinstance(found := getattr(self, name), types):
                raise InvalidInputError(
                    f"{name} of config.lln must not be {shown(found)}; convert the original model "
                    "again."
                )
        if self.format != FORMAT:
            raise InvalidInputError(
                f"config.lln has format {self.format}, this version of lln reads {FORMAT}; "
                "convert the original model again."
            )
        check_choice("matching", self.matching, (*KEYS_MATCHING, None))
        checks.check_impl(self.impl)
        check_choice("statistics", self.statistics, STATISTICS)
        if self.block_size is not None:
            checks.check_block_size(self.block_size)
        checks.check_count("keys", self.keys, 0)
        check_group_size(self.group_size, self.block_size or KEYS_BLOCK)
        checks.check_count("convolution", self.convolution, 0)
        for name, least in _PAGE_SIZES.items():
            if getattr(self, name) is not None:
                checks.check_count(name, getattr(self, name), least)
        offset = self.offset
        number = isinstance(offset, Real) and not isinstance(offset, bool) and math.isfinite(offset)
        if not (offset is None or offset in KEPT_OFFSETS or number):
            raise InvalidInputError(
                f"offset must be a finite number, 'fixed', 'learned' or None, got {shown(offset)}."
            )
        if isinstance(self.mix, str):
            if self.mix not in LEARNED_JOINS:
                known = ", ".join(map(repr, LEARNED_JOINS))
                meant = did_you_mean(self.mix, LEARNED_JOINS)
                raise InvalidInputError(
                    f"mix must be a number or one of {known}, got {self.mix!r}{meant}."
                )
        elif fault(self.mix, float) or not 0 <= self.mix <= 1:
            raise InvalidInputError(f"mix must be a number in [0, 1], got {shown(self.mix)}.")
        if not self.attached:
            self._check_stateless()

    def criterion(self, attention: str) -> str:
        """What α and β of an attention are matched by."""
        return criterion_of(self.matching, attention)

    def of_model(self, is_causal: bool, is_rotary: bool) -> Settings:
        """With the form of ``lln_keys`` that suits a model, where none was asked for.

        A causal model gets pages, and so does one whose tokens know their places by rotations:
        block, keys and slots were made for places that are added to the tokens.
        """
        if self.pages == 0 or (self.pages is None and not (is_causal or is_rotary)):
            return replace(self, pages=0)
        given = {name: getattr(self, name) for name in CAUSAL_PAGES}
        given = {name: number for name, number in given.items() if number is not None}
        return replace(self, **(self.usual_pages(is_causal) | given), offset=None)

    @staticmethod
    def usual_pages(is_causal: bool) -> dict[str, int]:
        """The sizes of the form with pages, where they are left out."""
        return CAUSAL_PAGES if is_causal else OTHER_PAGES

    def _check_stateless(self) -> None:
        """A plain function has no module to keep statistics or parameters in."""
        if isinstance(self.offset, str):
            raise InvalidInputError(
                f"offset={self.offset!r} needs a module to live in: use "
                "lln.integrations.convert.convert(model, 'lln_keys', calibrate=batch)."
            )
        for name, found, stateless in (
            ("statistics", self.statistics, self.statistics in ("sample", "fixed")),
            ("mix", self.mix, not isinstance(self.mix, str)),
            ("convolution", self.convolution, self.convolution == 0),
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
    def of_conversion(
        cls,
        attention: str,
        calibrated: bool,
        statistics: str | None,
        matching: str | None,
        mix: float | str,
        *,
        keys: int | None = None,
        pages: int | None = 0,
        **options: Any,
    ) -> Settings:
        """What `convert` builds into a model, with defaults where it was told None."""
        check_choice("attention", attention, ATTENTIONS)
        pages = _form_asked_for(attention, pages, statistics, matching, keys, options)
        if statistics is None:
            statistics = "fixed" if calibrated else "sample"
        if statistics in ("fixed", "learned") and not calibrated:
            raise InvalidInputError(
                f"statistics {statistics!r} needs calibrate, inputs to find α and β on."
            )
        if attention == "lln_keys" and mix != 0.5:
            raise InvalidInputError(
                f"mix goes with attention 'lln_diag': the one softmax of 'lln_keys' weighs its "
                f"parts itself; choose 'lln_diag' or leave mix out, got {mix!r}."
            )
        offset = None
        if attention == "lln_keys" and statistics != "sample" and calibrated:
            # Kept as α and β are.
            offset = "fixed" if statistics == "fixed" else "learned"
        matching = criterion_of(matching, attention)
        options |= {"mix": mix, "keys": KEYS if keys is None else keys, "pages": pages}
        return cls(matching, statistics, offset=offset, attached=True, **options)

    @classmethod
    def of(cls, config: object) -> Settings:
        """The settings a configuration holds; defaults where it holds none.

        Args:
            config: A transformers configuration, or anything with an attribute ``lln``.
        """
        hidden = config is None or is_compiling()
        found = getattr(config, "lln", None) if hidden else held_by(config)
        if found is None:
            return _DEFAULTS
        if not isinstance(found, dict):
            raise InvalidInputError(
                f"config.lln must be a dictionary of settings, got {type(found).__name__}."
            )
        before, settings = _known.get(id(found), ({}, _DEFAULTS))
        if list(found) == list(before) and all(map(is_, found.values(), before.values())):
            return settings
        given, found = found, dict(found)
        # Once queries could also choose by their features.
        select = found.pop("select", "block")
        if select != "block":
            raise InvalidInputError(
                f"config.lln has select={shown(select)}, and keys are chosen by blocks only; "
                "convert the original model again, or use the pages of lln.page_attention, which "
                "every query chooses for itself."
            )
        unknown = sorted(set(found) - _NAMES)
        if unknown:
            said = ", ".join(f"{name}{did_you_mean(name, _NAMES)}" for name in unknown)
            raise InvalidInputError(
                f"config.lln has unknown settings {said}; known are {', '.join(sorted(_NAMES))}."
            )
        settings = cls(**found)
        if not is_compiling():
            if len(_known) >= 256:
                _known.clear()
            _known[id(given)] = dict(given), settings
        return settings

    def as_dict(self) -> dict[str, Any]:
        """What to keep in ``config.lln``."""
        return asdict(self)


def _form_asked_for(
    attention: str,
    pages: int | None,
    statistics: str | None,
    matching: str | None,
    keys: int | None,
    options: dict[str, Any],
) -> int | None:
    """How many pages a conversion asks for, None = as suits the model; refuses a mixture."""
    of_pages = [name for name in _PAGE_SIZES if options.get(name) is not None]
    of_pages += ["pages"] if pages else []
    if attention != "lln_keys" or pages == 0:
        if of_pages:
            raise InvalidInputError(
                f"{of_pages[0]} goes with the pages of attention 'lln_keys', got attention "
                f"{attention!r}, pages={pages!r}; leave it out."
            )
        return 0
    said = {"keys": keys, "matching": matching, **options}
    of_blocks = [name for name in ("keys", "matching", *_OF_BLOCKS) if said.get(name) is not None]
    of_blocks += ["statistics"] if statistics in ("running", "learned") else []
    if of_blocks and of_pages:
        raise InvalidInputError(
            f"{of_blocks[0]} goes with blocks, keys and slots, {of_pages[0]} with pages, which "
            "have neither α nor β; choose one of the two forms."
        )
    if of_pages and pages is None:
        return CAUSAL_PAGES["pages"]
    return 0 if of_blocks else pages


def check_layers(layers: dict[str, dict[str, Any]] | None) -> None:
    """Refuse what no module can be built from; see `Settings.layers`."""
    if layers is None:
        return
    if len(layers) > _MOST_LAYERS:
        raise InvalidInputError(
            f"config.lln['layers'] has {len(layers):,} entries, and at most {_MOST_LAYERS:,} are "
            "read; convert the original model again."
        )
    for name, sizes in layers.items():
        check_sizes(name, sizes)


def check_sizes(name: str, sizes: Any) -> None:
    """Refuse an entry of ``layers``, or of what `lln.integrations.sdpa.describe` wrote."""
    if sizes == _KEPT_SOFTMAX:
        return
    found = fault(sizes, _HEADS, name)
    if found is None:
        least = {"num_heads": 1, "head_dim": 1, "value_dim": 1, "keys": 0, "key_heads": 1}
        for size in [size for size in least if sizes.get(size) is not None]:
            checks.check_count(f"{size} of {name[:80]!r}", sizes[size], least[size])
    else:
        raise InvalidInputError(
            f"in config.lln['layers'] {found}; convert the original model again."
        )


def held_by(config: object) -> Any:
    """What a configuration of transformers holds as its settings, checked or not; None = nothing.

    Its own way to an attribute takes longer than all that is asked in a short call.
    """
    return object.__getattribute__(config, "__dict__").get("lln")


# Dictionaries that were checked, by their ids, with the very objects that they held: every layer
# asks in every call.
_known: dict[int, tuple[dict[str, Any], Settings]] = {}
_NAMES = frozenset(field.name for field in fields(Settings))
_DEFAULTS = Settings()
