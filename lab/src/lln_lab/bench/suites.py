"""Which cases are run: a default suite per kind of device, or the product of the options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lln.errors import InvalidInputError
from lln_lab.bench.cases import Case
from lln_lab.bench.operations import OPERATIONS
from lln_lab.choices import check_choices

HEADS = 12
# B·N, the tokens per batch on a GPU at every length.
GPU_TOKENS = 65536
GPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CPU_LENGTHS = (128, 256, 512, 1024, 2048, 4096)

PASSES = {"forward": False, "both": True}
DTYPES = ("float64", "float32", "bfloat16", "float16")

_GPU_DENSE = ("sdpa_flash", "sdpa_cudnn", "lln", "lln_matched", "lln_diag")
_GPU_CAUSAL = (
    "sdpa_flash_causal",
    "sdpa_cudnn_causal",
    "lln_causal",
    "lln_diag_causal",
    "fla_causal",
    "fla_causal_raw",
)
_GPU_FEW = ("sdpa_flash", "sdpa_cudnn", "lln", "lln_diag")
# The default block is as wide as a head.
_GPU_WIDE = (*_GPU_FEW, "lln_diag_64")
_CPU = ("sdpa", "lln", "lln_matched", "lln_diag", "sdpa_causal", "lln_causal")


def default_cases(device: str) -> list[Case]:
    """The suite of a device, the most important cases first."""
    return list(_gpu_cases() if device == "cuda" else _cpu_cases())


def choose_cases(
    device: str,
    lengths: Sequence[int] | None = None,
    operations: Sequence[str] | None = None,
    passes: Sequence[str] | None = None,
    dtype: str | None = None,
    width: int | None = None,
) -> list[Case]:
    """The cases that the options ask for, checked.

    Without a length, dtype or width: the device's suite, restricted to the given operations and
    passes. With one of them: every operation at every length and pass.

    Args:
        device: ``"cpu"`` or ``"cuda"``; decides the defaults of the rest.
        lengths: N of every case; the batch is 1 on a CPU and 65,536 / N on a GPU.
        operations: Names of the registry.
        passes: Names in `PASSES`.
        dtype: Dtype of all cases.
        width: D of all cases.

    Raises:
        InvalidInputError: One sentence if a name is unknown or no case is left.
    """
    check_choices("--operations", operations, OPERATIONS)
    check_choices("--passes", passes, PASSES)
    check_choices("--dtype", [dtype] if dtype else None, DTYPES)
    if width is not None and width < 1:
        raise InvalidInputError(f"--width must be at least 1, got {width}.")
    on_gpu = device == "cuda"
    directions = [backward for name, backward in PASSES.items() if not passes or name in passes]
    if lengths or dtype or width:
        names = operations or ((*_GPU_DENSE, *_GPU_CAUSAL) if on_gpu else _CPU)
        cases = [
            case
            for backward in directions
            for tokens in lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS)
            for case in _cases(
                names,
                max(1, GPU_TOKENS // tokens) if on_gpu else 1,
                tokens,
                width or 64,
                dtype or ("bfloat16" if on_gpu else "float32"),
                backward,
            )
        ]
    else:
        cases = [
            case
            for case in default_cases(device)
            if case.backward in directions and (not operations or case.operation in operations)
        ]
    if not cases:
        raise InvalidInputError(
            f"the {device} suite has no case of {', '.join(operations or ('any operation',))} for "
            f"{', '.join(passes or PASSES)}; give --lengths to run it anyway."
        )
    return cases


def _cases(
    operations: Iterable[str], batch: int, tokens: int, width: int, dtype: str, backward: bool
) -> Iterator[Case]:
    for name in operations:
        if not (backward and OPERATIONS[name].forward_only):
            yield Case(name, batch, HEADS, tokens, width, dtype, backward)


def _gpu_cases() -> Iterator[Case]:
    """bf16, H = 12, B·N = 65,536; then other widths, B = 1, packed and decoding at a few shapes."""
    groups: list[tuple[tuple[str, ...], tuple[int, ...], int, int | None]] = [
        (_GPU_DENSE, GPU_LENGTHS, 64, None),
        (_GPU_CAUSAL, (512, 1024, 2048, 4096, 16384, 65536), 64, None),
        (("lln_compiled", "lln_diag_compiled"), (512, 4096), 64, None),
        (("diag_sdpa", "diag"), (512, 4096, 65536), 64, None),
        (("flash_packed", "lln_packed"), (4096,), 64, None),
        (("sdpa_decode", "lln_decode"), (4096,), 64, 64),
        (_GPU_FEW, (512, 4096, 16384), 32, None),
        (_GPU_WIDE, (512, 4096, 16384), 128, None),
        (_GPU_WIDE, (512, 4096, 16384), 256, None),
        (_GPU_FEW, (512, 2048, 8192), 64, 1),
    ]
    for operations, lengths, width, batch in groups:
        for backward in (False, True):
            for tokens in lengths:
                size = batch or GPU_TOKENS // tokens
                yield from _cases(operations, size, tokens, width, "bfloat16", backward)


def _cpu_cases() -> Iterator[Case]:
    """float32, B = 1, H = 12, D = 64 over the length; packed and decoding at one shape."""
    for backward in (False, True):
        for tokens in CPU_LENGTHS:
            yield from _cases(_CPU, 1, tokens, 64, "float32", backward)
        yield from _cases(("lln_packed",), 8, 256, 64, "float32", backward)
        yield from _cases(("diag_sdpa", "diag"), 1, 2048, 64, "float32", backward)
    yield from _cases(("sdpa_decode", "lln_decode"), 1, 2048, 64, "float32", backward=False)
