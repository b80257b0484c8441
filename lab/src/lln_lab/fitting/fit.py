"""The moment-matching constants, fitted from measurements (paper, appendix A.7).

For every head width d, length N and score variance p, the measured curves give the scale s at which
LLN attention has the same statistic as softmax attention. One polynomial is then fitted to all of
them, with u = ln p, w = ln(d / 64), x = ln(N / 1024):

    ln s = sum_i u^i (M[i,0] + M[i,1] w + M[i,2] w^2 + x X[i]),    i = 0..4

The same measurements also give the paper's a and b, Eq. (34), and fresh seeds show how accurate
every criterion is.
"""

import json
import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.checks.reading import parsed_json
from lln.errors import InvalidInputError
from lln.files import writing
from lln_lab.fitting.injection import Curves, Injection, measure

Progress = Callable[[int, int, str], None]
# The content of constants.json, or one criterion of it.
Constants = dict[str, Any]

P_RANGE = (0.03, 18.0)
D_RANGE = (8, 512)
N_RANGE = (64, 65536)
# Wide enough to contain the solution everywhere in the ranges above, for every criterion.
S_RANGE = (0.3, 12.0)

# The authors' published constants of Eq. (10): kept as they are, never refitted.
PAPER = {"a": 0.14855178144710912, "b": -0.35487039130661086}

# Powers of u with a term in ln N: variance matching does not depend on the length.
LENGTH_TERMS = {"variance": 0, "entropy": 4}

# Far from 0, 1, 2, ..., so that the validation uses draws that the fit has not seen.
_CHECK_SEED = 1_000_000


@dataclass(frozen=True)
class FitConfig:
    """What a fit measures, and where it keeps its measurements.

    Attributes:
        widths: Head widths d of the fit.
        lengths: Sequence lengths N of the fit.
        seeds: Independent repetitions of each (d, N).
        p_points: Points of the logarithmic grid in p.
        s_points: Points of the logarithmic grid in s.
        rows: Query rows per draw.
        keys: Least number of keys measured for each (d, N, seed).
        check_widths: Head widths of the validation.
        check_lengths: Lengths of the validation.
        check_p: Score variances of the validation.
        check_seeds: Repetitions of the validation.
        device: ``"cpu"`` or ``"cuda"``.
        work: File of measurements; an interrupted fit resumes from it.
        command: Command line recorded in the result.
    """

    widths: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    lengths: tuple[int, ...] = (64, 128, 512, 1024, 4096, 16384, 65536)
    seeds: int = 4
    p_points: int = 24
    s_points: int = 40
    rows: int = 128
    keys: int = 8192
    check_widths: tuple[int, ...] = (8, 12, 24, 64, 96, 192, 512)
    check_lengths: tuple[int, ...] = (128, 768, 3072, 16384)
    check_p: tuple[float, ...] = (0.05, 0.12, 0.25, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0)
    check_seeds: int = 4
    device: str = "cpu"
    work: Path = Path("lln-fit.jsonl")
    command: str = "lln fit"

    def quick(self) -> "FitConfig":
        """The same fit on a coarse grid: a check of the program, under a minute on two cores."""
        return replace(
            self,
            widths=(8, 32, 128, 512),
            lengths=(64, 1024, 8192),
            seeds=1,
            p_points=12,
            s_points=24,
            rows=64,
            keys=4096,
            check_widths=(8, 64, 512),
            check_lengths=(128, 4096),
            check_p=(0.05, 0.25, 1.0, 4.0, 16.0),
            check_seeds=2,
        )

    def requests(self) -> list[Injection]:
        """Measurements the polynomials are fitted to."""
        p, s = _log_grid(P_RANGE, self.p_points), _log_grid(S_RANGE, self.s_points)
        return [
            Injection(d, n, seed, p, s, self.rows, self.keys)
            for seed in range(self.seeds)
            for d in self.widths
            for n in self.lengths
        ]

    def paper_requests(self) -> list[Injection]:
        """Measurements of Eq. (34): d = 64, N = 512, sigma uniform on [0.7, 3.1]."""
        sigma = tuple(round(0.75 + 0.1 * i, 2) for i in range(24))
        return [Injection(64, 512, seed, (), sigma, 512, self.keys) for seed in range(self.seeds)]

    def check_requests(self, criteria: dict[str, Constants]) -> list[Injection]:
        """Measurements on fresh seeds at the scales that the criteria choose."""
        p = torch.tensor(self.check_p, dtype=torch.float64)
        found = []
        for seed in range(_CHECK_SEED, _CHECK_SEED + self.check_seeds):
            for d in self.check_widths:
                for n in self.check_lengths:
                    s = torch.cat([scale(values, p, d, n) for values in criteria.values()])
                    found.append(
                        Injection(d, n, seed, self.check_p, tuple(s.tolist()), self.rows, self.keys)
                    )
        return found


def fit_constants(config: FitConfig, progress: Progress | None = None) -> Constants:
    """Fits the constants from scratch and returns the content of ``constants.json``.

    Args:
        config: What to measure. Measurements already in ``config.work`` are not made again.
        progress: Called as ``progress(done, total, text)`` after each measurement.

    Returns:
        ``{"criteria": {...}, "fit": {...}}``: the constants, and how they were made.
    """
    requests, paper_requests = config.requests(), config.paper_requests()
    checks = len(config.check_widths) * len(config.check_lengths) * config.check_seeds
    total = len(requests) + len(paper_requests) + checks
    store = _WorkFile(config.work)

    def run(batch: list[Injection], done: int, what: str) -> list[Curves]:
        results = []
        for request in batch:
            results.append(store.measured(request, config.device))
            if progress is not None:
                text = f"{what}: d={request.d} N={request.n} seed={request.seed}"
                progress(done + len(results), total, text)
        return results

    measured = list(zip(requests, run(requests, 0, "curves"), strict=True))
    paper_curves = run(paper_requests, len(requests), "paper's constants")
    criteria: dict[str, Constants] = {"paper": dict(PAPER)}
    residuals: dict[str, dict[str, float]] = {}
    for name, terms in LENGTH_TERMS.items():
        criteria[name], residuals[name] = fit_criterion(name, measured, terms)
    check_requests = config.check_requests(criteria)
    check_curves = run(check_requests, total - checks, "validation")
    return {
        "criteria": criteria,
        "fit": {
            "command": config.command,
            "seeds": config.seeds,
            "grid": {
                "widths": list(config.widths),
                "lengths": list(config.lengths),
                "p": [*P_RANGE, config.p_points],
                "s": [*S_RANGE, config.s_points],
                "rows": config.rows,
                "keys": config.keys,
            },
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "device": _device_name(config.device),
            "paper_refit": refit_paper(paper_requests, paper_curves),
            "residuals": residuals,
            "validation": {
                "widths": list(config.check_widths),
                "lengths": list(config.check_lengths),
                "p": list(config.check_p),
                "seeds": config.check_seeds,
                "criteria": judge(list(criteria), check_requests, check_curves),
            },
        },
    }


def scale(criterion: Constants, p: Tensor, d: int, n: int) -> Tensor:
    """Evaluates s = F(p, d, N) of one criterion of the data file.

    Args:
        criterion: ``{"a", "b"}`` of Eq. (10), or ``{"M", "X"}`` with their ranges.
        p: Score variances, any shape, float64.
        d: Head width.
        n: Number of keys.

    Returns:
        s, shaped as p.
    """
    if "a" in criterion:
        return ((p - criterion["b"]) / (2 * criterion["a"])).sqrt()
    inside = p.clamp(*criterion["p_range"])
    d = min(max(d, criterion["d_range"][0]), criterion["d_range"][1])
    n = min(max(n, criterion["n_range"][0]), criterion["n_range"][1])
    flat = [value for row in criterion["M"] for value in row] + list(criterion["X"])
    terms = _terms(inside, d, n, len(criterion["X"]))
    log_s = terms @ torch.tensor(flat, dtype=p.dtype, device=p.device)
    return log_s.exp() * (p / inside).sqrt()


def match(name: str, request: Injection, curves: Curves) -> tuple[Tensor, Tensor]:
    """Finds where LLN attention has the same statistic as softmax attention.

    The LLN curve is inverted by linear interpolation in log-log scale. The entropy enters as its
    deficit log2(N) - H, which like the variance is close to a power of s.

    Args:
        name: ``"variance"`` or ``"entropy"``.
        request: What was measured.
        curves: The measurement.

    Returns:
        For each p of the request ln s, and how much one unit of ln s changes the statistic there:
        ln variance, or entropy in bits.

    Raises:
        InvalidInputError: If the measured curve does not increase, or does not reach a target.
    """

    def amount(values: list[float]) -> Tensor:
        found = torch.tensor(values, dtype=torch.float64)
        return math.log2(request.n) - found if name == "entropy" else found

    lln, softmax = amount(curves["lln"][name]), amount(curves["softmax"][name])
    level, target = lln.log(), softmax.log()
    where = f"the {name} curve at d={request.d}, N={request.n}, seed={request.seed}"
    if not bool((level.diff() > 0).all()):
        raise InvalidInputError(f"{where} does not increase with s")
    if not bool(((target >= level[0]) & (target <= level[-1])).all()):
        raise InvalidInputError(
            f"{where} does not reach the softmax attention's: widen the grid of s"
        )
    log_s = torch.tensor(request.s, dtype=torch.float64).log()
    right = torch.searchsorted(level, target).clamp(min=1)
    left = right - 1
    share = (target - level[left]) / (level[right] - level[left])
    counted = lln if name == "entropy" else level
    slope = (counted[right] - counted[left]) / (log_s[right] - log_s[left])
    return torch.lerp(log_s[left], log_s[right], share), slope


def fit_criterion(
    name: str, measured: Iterable[tuple[Injection, Curves]], length_terms: int
) -> tuple[Constants, dict[str, float]]:
    """Fits one polynomial by weighted least squares.

    Args:
        name: ``"variance"`` or ``"entropy"``.
        measured: Requests and their curves.
        length_terms: Number of coefficients X.

    Returns:
        The criterion of the data file, and the residuals of ln s.
    """
    terms, targets, slopes = [], [], []
    for request, curves in measured:
        p = torch.tensor(request.p, dtype=torch.float64)
        terms.append(_terms(p, request.d, request.n, length_terms))
        log_s, slope = match(name, request, curves)
        targets.append(log_s)
        slopes.append(slope)
    design, log_s, slope = torch.cat(terms), torch.cat(targets), torch.cat(slopes)
    # Weights: an error of ln s counts by its effect on the statistic. The entropy is most sensitive
    # at large p, so this lowers its largest error; the 1 keeps s itself right at small p.
    weight = (1 + slope).unsqueeze(-1)
    solution = torch.linalg.lstsq(weight * design, weight * log_s.unsqueeze(-1)).solution
    # Rounded first, so that the residuals are those of the numbers in the file.
    flat = [round(value, 7) for value in solution.flatten().tolist()]
    error = design @ torch.tensor(flat, dtype=torch.float64) - log_s
    criterion = {
        "M": [flat[3 * i : 3 * i + 3] for i in range(5)],
        "X": flat[15:],
        "p_range": list(P_RANGE),
        "d_range": list(D_RANGE),
        "n_range": list(N_RANGE),
    }
    rms, most = error.square().mean().sqrt().item(), error.abs().max().item()
    return criterion, {"rms_log_s": round(rms, 5), "max_log_s": round(most, 5)}


def refit_paper(requests: Iterable[Injection], curves: Iterable[Curves]) -> dict[str, float]:
    """Fits the paper's a and b, Var(log P) = a * 2 s^2 + b over the whole matrix, Eq. (34)."""
    x = torch.tensor([value for r in requests for value in r.s], dtype=torch.float64)
    y = torch.tensor([v for c in curves for v in c["lln"]["total"]], dtype=torch.float64)
    design = torch.stack([2 * x.square(), torch.ones_like(x)], -1)
    a, b = torch.linalg.lstsq(design, y.unsqueeze(-1)).solution.flatten().tolist()
    return {"a": round(a, 6), "b": round(b, 6)}


def judge(names: list[str], requests: list[Injection], curves: list[Curves]) -> Constants:
    """Compares each criterion's LLN attention with softmax attention on the same inputs.

    Args:
        names: Criteria, in the order of their scales in each request.
        requests: Requests made by `FitConfig.check_requests`.
        curves: Their measurements.

    Returns:
        For each criterion the mean and the maximum over (d, N, p) of the relative error of the
        within-row variance and of the entropy's error in bits.
    """
    # Averaged over the seeds first, because this judges the constants, not single draws.
    homes: dict[tuple[int, int], list[Curves]] = {}
    for request, found in zip(requests, curves, strict=True):
        homes.setdefault((request.d, request.n), []).append(found)

    def table_of(side: str, name: str) -> Tensor:
        values = [[found[side][name] for found in group] for group in homes.values()]
        return torch.tensor(values, dtype=torch.float64).mean(1)

    softmax = {name: table_of("softmax", name) for name in ("variance", "entropy")}
    lln = {name: table_of("lln", name) for name in ("variance", "entropy")}
    table, width = {}, len(requests[0].p)
    for i, name in enumerate(names):
        own = slice(i * width, (i + 1) * width)
        variance = (lln["variance"][:, own] / softmax["variance"] - 1).abs()
        entropy = (lln["entropy"][:, own] - softmax["entropy"]).abs()
        table[name] = {
            "variance_mean": round(variance.mean().item(), 4),
            "variance_max": round(variance.max().item(), 4),
            "entropy_mean": round(entropy.mean().item(), 4),
            "entropy_max": round(entropy.max().item(), 4),
        }
    return table


_CURVES = {str: [float]}
_RECORD = {"request": str, "curves": {"softmax": _CURVES, "lln": _CURVES}}


class _WorkFile:
    """Measurements on disk, one JSON object per line, so that an interrupted fit can resume."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Curves] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines():
            try:
                record = parsed_json(line.encode(), _RECORD, "this line", "measure it again")
            except InvalidInputError:
                # The interruption cut this line short: the measurement is repeated.
                continue
            self.known[record["request"]] = record["curves"]
        if text and not text.endswith("\n"):
            # Without this newline the next record would be appended to the broken one and lost.
            self._append("\n")

    def measured(self, request: Injection, device: str) -> Curves:
        """The curves of a request: from the file, or measured now and written to it."""
        name = request.digest()
        if name not in self.known:
            self.known[name] = measure(request, device)
            record = {"request": name, "d": request.d, "n": request.n, "seed": request.seed}
            self._append(json.dumps({**record, "curves": self.known[name]}) + "\n")
        return self.known[name]

    def _append(self, text: str) -> None:
        with writing(self.path, "the measurements before are kept"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)


def _terms(p: Tensor, d: int, n: int, length_terms: int) -> Tensor:
    """Rows of the design matrix, ``[..., 15 + length_terms]``: M row by row, then X."""
    u, w, x = p.log(), math.log(d / 64), math.log(n / 1024)
    powers = [u**i for i in range(5)]
    columns = [power * w**j for power in powers for j in range(3)]
    columns += [power * x for power in powers[:length_terms]]
    return torch.stack(columns, -1)


def _log_grid(bounds: tuple[float, float], points: int) -> tuple[float, ...]:
    """A logarithmic grid; rounded, so that it has the same digest on every machine."""
    low, high = (math.log(value) for value in bounds)
    step = (high - low) / (points - 1)
    return tuple(round(math.exp(low + i * step), 6) for i in range(points))


def _device_name(device: str) -> str:
    """What the record calls the device."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
