"""The systems as a table and one by one, for the command line and the docs."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lln_lab.choices import check_choices
from lln_lab.peers.card import Card
from lln_lab.peers.encoder import compare_parameters
from lln_lab.peers.options import options_of
from lln_lab.peers.registry import available, card, find

# Where parameters are counted: two layers of RoBERTa-base, whose layers may differ.
SIZE = {"depth": 2, "embed_dim": 768, "num_heads": 12, "max_len": 512}
SIZE_IN_WORDS = (
    f"an encoder of {SIZE['depth']} layers, {SIZE['embed_dim']} wide, {SIZE['num_heads']} heads, "
    f"{SIZE['max_len']} tokens"
)
KINDS = {
    "core": "heads in, heads out: standard projections go around it",
    "mixer": "owns its projections",
    "block": "replaces attention and feed-forward",
}
GPU_REPEATS = "the same bits every time only under torch.use_deterministic_algorithms(True)"
HEADS = ("name", "kind", "complexity", "causal", "mask", "row-stochastic", "oracle", "adds")
# Packages that the tests compare systems with, as cards name them.
LIBRARIES = (
    "torch",
    "transformers",
    "performer-pytorch",
    "linformer",
    "nystrom_attention",
    "flash_pytorch",
)


def in_order(names: Iterable[str] | None = None) -> list[str]:
    """Names by family, as tables list them; None = every one."""
    chosen = set(available() if names is None else names)
    return [name for name in available() if name in chosen]


def table() -> tuple[list[str], list[list[str]]]:
    """Headings and cells, one line per system.

    Example:
        >>> heads, lines = table()
        >>> lines[0]
        ['softmax', 'core', 'O(N² d)', 'yes', 'yes', 'yes', 'torch', '0']
    """
    parameters = compare_parameters(in_order(), **SIZE)
    softmax = parameters["softmax"].total
    lines = []
    for name, count in parameters.items():
        one = card(name)
        lines.append(
            [
                name,
                one.kind,
                one.complexity,
                _yes(one.causal) + ("*" if one.causal_limit else ""),
                _yes(one.padding == "longer"),
                _yes(one.row_stochastic),
                _first_library(one),
                _signed(count.total - softmax),
            ]
        )
    return list(HEADS), lines


def notes() -> list[str]:
    """The notes below the table, one sentence per line."""
    softmax = compare_parameters(["softmax"], **SIZE)["softmax"].total
    limits = {name: card(name).causal_limit for name in in_order()}
    return [
        *(f"* {name}: {limit}." for name, limit in limits.items() if limit),
        "mask: appending padded tokens changes no real token.",
        "oracle: the library whose numbers the tests compare with, besides the dense N×N form.",
        f"adds: parameters beyond softmax's {softmax / 1e6:.1f} M in {SIZE_IN_WORDS}, "
        "embeddings left out.",
    ]


def data(names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Everything that is known of the systems, fit for JSON."""
    parameters = compare_parameters(in_order(names), **SIZE)
    return [
        {
            **asdict(card(name)),
            "options": {
                option.name: {"default": _plain(option.default), "text": option.text}
                for option in options_of(name)
            },
            "parameters": count.total,
            "parameters_relative": round(count.relative, 4),
            "parameters_of": SIZE,
        }
        for name, count in parameters.items()
    ]


def description(name: str) -> str:
    """The full card of a system, as text.

    Raises:
        InvalidInputError: If there is none of this name, with the names there are.
    """
    find(name)
    one, count = card(name), compare_parameters([name], **SIZE)[name]
    facts = {
        "equation": one.equation,
        "citation": one.citation,
        "kind": f"{one.kind}: {KINDS[one.kind]}",
        "complexity": one.complexity + (", linear or N log N" if one.is_linear else ""),
        "causal": "yes, is_causal=True" if one.causal else "no such form",
        "causal limit": one.causal_limit,
        "padding": "appending padded tokens changes no real token",
        "row-stochastic": _yes(one.row_stochastic),
        "permutation": "equivariant" if one.equivariant else "the order of the tokens matters",
        "on a GPU": "the same bits every time" if one.repeats_on_gpu else GPU_REPEATS,
        "max_len": "longer inputs are refused" if one.needs_max_len else "",
        "random": one.random,
        "adds": one.adds,
        "parameters": f"{count.total:,}, {count.relative:.3f}× softmax, {SIZE_IN_WORDS}",
        "layers": _layers(one),
        "checked with": one.oracle,
        "departures": one.departures,
    }
    lines = [f"{one.title} ({name})", ""]
    lines += [f"{label:15} {text}" for label, text in facts.items() if text]
    options = options_of(name)
    lines += ["", "options:" if options else "no options"]
    lines += [f"  {one.name}={one.default!r}: {one.text}" for one in options]
    example = f'lln_lab.peers.build("{name}", embed_dim=768, num_heads=12, max_len=512)'
    return "\n".join([*lines, "", f"build it: {example}"])


def check_names(names: Iterable[str], option: str, also: Iterable[str] = ()) -> None:
    """Refuse names that are neither systems nor among ``also``.

    Raises:
        InvalidInputError: With the names there are.
    """
    check_choices(option, names, (*available(), *also))


def _layers(one: Card) -> str:
    said = []
    if one.layers_per_block > 1:
        said.append(f"{one.layers_per_block} blocks stand for one layer")
    if one.period > 1:
        said.append(f"they differ, {one.period} of them hold the pattern")
    return "; ".join(said)


def _first_library(one: Card) -> str:
    """The first package its card is checked with; without one, the dense form alone."""
    named = [part.split()[0].rstrip(",") for part in one.oracle.split(";")]
    return next((name for name in named if name in LIBRARIES), "dense form")


def _signed(count: int) -> str:
    """A difference in few characters.

    >>> [_signed(count) for count in (0, 24, 196_608, -2_363_904)]
    ['0', '+24', '+197 k', '−2.4 M']
    """
    size, unit = abs(count), ""
    sign = "+" if count > 0 else "−" if count else ""
    if size >= 999_500:
        return f"{sign}{size / 1e6:.1f} M"
    if size >= 1000:
        size, unit = round(size / 1000), " k"
    return f"{sign}{size}{unit}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
