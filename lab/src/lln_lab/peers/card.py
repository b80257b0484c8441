"""The facts about a system, as data: ``lln peers``, the docs and the tests read them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Card:
    """One attention system.

    Attributes:
        name: Registry name.
        title: As its paper calls it.
        kind: ``"core"`` (heads in, heads out: standard projections go around it), ``"mixer"``
            (owns its projections) or ``"block"`` (replaces attention *and* feed-forward,
            residual and norms included).
        citation: Authors, year and arXiv number.
        equation: One line of mathematics, N tokens, d head width.
        complexity: Time in N and its own sizes.
        is_linear: Whether time grows no faster than N log N at a fixed setting.
        causal: Whether ``is_causal=True`` is possible.
        causal_limit: How later tokens still matter in the causal form; empty where they do not.
        padding: ``"longer"`` for every system: appending padded tokens changes no real token.
        row_stochastic: Whether each row of its matrix is non-negative and sums to 1, up to a floor
            of the denominator. A row without any weight is zero; kernels with a ReLU have some.
        equivariant: Whether permuting the tokens permutes the outputs.
        repeats_on_gpu: Whether the same call gives the same bits twice on a GPU, gradients
            included, as it does on a CPU. False where threads add floats in the order in which they
            arrive (gradients of gathers, convolutions and fused softmax attention); then
            ``torch.use_deterministic_algorithms(True)`` makes the bits repeat.
        needs_max_len: Whether longer inputs than ``max_len`` are refused.
        random: What is drawn at random, empty if nothing.
        adds: Parameters beyond the four projections (of a core), or all of them in words.
        oracle: What the tests compare it with.
        departures: Where the default differs from published code, and which ``compat`` undoes it.
        layers_per_block: Blocks only: how many of them replace one layer of attention and
            feed-forward at about the same number of parameters (FLASH: 2).
        period: After how many layers the pattern repeats, where layers differ. Measurements are
            the mean over one period.
    """

    name: str
    title: str
    kind: Literal["core", "mixer", "block"] = "core"
    citation: str
    equation: str
    complexity: str
    is_linear: bool = True
    causal: bool = True
    padding: Literal["longer"] = "longer"
    row_stochastic: bool = True
    equivariant: bool = False
    oracle: str = "dense form"
    causal_limit: str = ""
    repeats_on_gpu: bool = True
    needs_max_len: bool = False
    random: str = ""
    adds: str = "none"
    departures: str = ""
    layers_per_block: int = 1
    period: int = 1
