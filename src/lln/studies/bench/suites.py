"""Which cases are run: a default for each kind of device, or the product of what is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lln.checks.names import check_choices
from lln.errors import InvalidInputError
from lln.studies.bench.cases import Case
from lln.studies.bench.operations import OPERATIONS

HEADS = 12
# Tokens in a batch on a GPU, whatever their length: B·N.
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
    "fla_causal",
    "fla_causal_raw",
)
_GPU_FEW = ("sdpa_flash", "sdpa_cudnn", "lln", "lln_diag")
_CPU = ("sdpa", "lln", "lln_matched", "lln_diag", "sdpa_causal", "lln_causal")


def default_cases(device: str) -> list[Case]:
    """The suite of a device, what matters most first."""
    return list(_gpu_cases() if device == "cuda" else _cpu_cases())


def product_cases(
    device: str,
    lengths: Sequence[int] | None = None,
    operations: Sequence[str] | None = None,
    passes: Sequence[str] | None = None,
    dtype: str | None = None,
    width: int | None = None,
) -> list[Case]:
    """Every operation at every length and pass.

    Args:
        device: ``"cpu"`` or ``"cuda"``; says the defaults of the rest.
        lengths: N of every case; the batch is 1 on a CPU and 65,536 / N on a GPU.
        operations: Names of the registry.
        passes: Of `PASSES`.
        dtype: Of all cases.
        width: D of all cases.
    """
    on_gpu = device == "cuda"
    lengths = lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS)
    operations = operations or ((*_GPU_DENSE, *_GPU_CAUSAL) if on_gpu else _CPU)
    return [
        case
        for backward in _directions(passes)
        for tokens in lengths
        for case in _cases(
            operations,
            max(1, GPU_TOKENS // tokens) if on_gpu else 1,
            tokens,
            width or 64,
            dtype or ("bfloat16" if on_gpu else "float32"),
            backward,
        )
    ]


def choose_cases(
    device: str,
    lengths: Sequence[int] | None = None,
    operations: Sequence[str] | None = None,
    passes: Sequence[str] | None = None,
    dtype: str | None = None,
    width: int | None = None,
) -> list[Case]:
    """The cases that the options ask for, checked.

    Without a length, dtype or width: the device's suite, of which operations and passes choose a
    part. With one: the product of everything (see `product_cases` for the arguments).

    Raises:
        InvalidInputError: One sentence on what is not known or leaves nothing to do.
    """
    _check(lengths, operations, passes, dtype, width)
    if lengths or dtype or width:
        cases = product_cases(device, lengths, operations, passes, dtype, width)
    else:
        directions = _directions(passes)
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


def _check(
    lengths: Sequence[int] | None,
    operations: Sequence[str] | None,
    passes: Sequence[str] | None,
    dtype: str | None,
    width: int | None,
) -> None:
    for option, given, known in (
        ("--operations", operations, OPERATIONS),
        ("--passes", passes, PASSES),
        ("--dtype", [dtype] if dtype else None, DTYPES),
    ):
        check_choices(option, given, known)
    for option, sizes in (
        ("--lengths", lengths or ()),
        ("--width", () if width is None else [width]),
    ):
        if any(size < 1 for size in sizes):
            raise InvalidInputError(f"{option} must be at least 1, got {min(sizes)}.")


def _directions(passes: Sequence[str] | None) -> list[bool]:
    return [PASSES[name] for name in PASSES if not passes or name in passes]


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
        (_GPU_CAUSAL, (512, 2048, 4096, 16384, 65536), 64, None),
        (("lln_compiled", "lln_diag_compiled"), (512, 4096), 64, None),
        (("diag_sdpa", "diag"), (512, 4096, 65536), 64, None),
        (("flash_packed", "lln_packed"), (4096,), 64, None),
        (("sdpa_decode", "lln_decode"), (4096,), 64, 64),
        (_GPU_FEW, (512, 4096, 16384), 32, None),
        (_GPU_FEW, (512, 4096, 16384), 128, None),
        (_GPU_FEW, (512, 4096, 16384), 256, None),
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
