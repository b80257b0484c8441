"""How busy other programs keep the processors, because that lengthens the times measured here."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 0.5
# Where Linux reports the processors' busy time.
_STAT = Path("/", "proc", "stat")


@dataclass(frozen=True)
class Load:
    """What else runs on this machine.

    Attributes:
        busy: Cores that other programs keep busy; None where the system does not report it.
        cores: Cores that this program may use.
        averaged: Whether ``busy`` is the load average of the last minute, including this program's
            own work, because the system reports nothing better.
    """

    busy: float | None
    cores: int
    averaged: bool = False

    @property
    def is_high(self) -> bool:
        """Whether it would affect times: a third of a core, or a tenth of many cores."""
        return self.busy is not None and self.busy >= max(0.3, 0.1 * self.cores)

    @property
    def warning(self) -> str:
        """One sentence if the load is high, else an empty string."""
        if not self.is_high:
            return ""
        return (
            f"This machine is not idle ({self}): times come out longer and noisier than they "
            "need be; measure again when nothing else runs."
        )

    def __str__(self) -> str:
        """In a few words."""
        if self.busy is None:
            return "unknown on this system"
        if self.averaged:
            return f"average of the last minute {self.busy:.1f} on {self.cores} cores"
        return f"other programs keep {self.busy:.1f} of {self.cores} cores busy"


def read_load(seconds: float = _SECONDS) -> Load:
    """Look at the processors for a moment, doing nothing.

    Args:
        seconds: How long.
    """
    cpus = own_cpus()
    before, own, start = _busy_seconds(cpus), time.process_time(), time.perf_counter()
    if before is None:
        if hasattr(os, "getloadavg"):
            return Load(os.getloadavg()[0], len(cpus), averaged=True)
        return Load(None, len(cpus))
    time.sleep(seconds)
    after, passed = _busy_seconds(cpus) or before, time.perf_counter() - start
    busy = (after - before - (time.process_time() - own)) / passed
    return Load(min(max(busy, 0.0), float(len(cpus))), len(cpus))


def own_cpus() -> set[int]:
    """Numbers of the processors that this program may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _busy_seconds(cpus: set[int]) -> float | None:
    """Seconds that the processors have been busy since boot; None where that is not reported."""
    try:
        lines = _STAT.read_text("ascii").splitlines()
    except (OSError, UnicodeError):
        return None
    ticks = 0
    for name, *numbers in map(str.split, filter(None, lines)):
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            # Skips idle and I/O wait; adds user, nice, system, interrupts, and time stolen by other
            # virtual machines.
            used = [int(number) for number in numbers[:8]]
            ticks += sum(used[:3]) + sum(used[5:])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None
