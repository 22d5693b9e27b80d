"""What the benchmarks measure with: turns of methods, limits of the machine, memory of the process."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path

import torch

Times = dict[str, float]
"""Seconds by stage; "total" among them."""


def interleave(
    steps: Mapping[Hashable, Callable[[], Times]], rounds: int, between: Callable[[], None], warm_up: int = 2
) -> dict[Hashable, Times]:
    """Medians by stage of `rounds` turns of every step, so that a busy moment of the machine meets all of them.

    Args:
        steps: what is timed, by name.
        rounds: turns that count, after `warm_up` that do not.
        between: called once a round.
    """
    samples = {name: [] for name in steps}
    for turn in range(warm_up + rounds):
        for name, step in steps.items():
            step_times = step()
            if turn >= warm_up:
                samples[name].append(step_times)
        between()
    return {
        name: {stage: statistics.median(times[stage] for times in taken) for stage in taken[0]}
        for name, taken in samples.items()
    }


def percentile(samples: list[float], percent: float) -> float:
    """The smallest sample that at least `percent` of them do not exceed."""
    return sorted(samples)[max(0, -int(-len(samples) * percent // 100) - 1)]


class Limits:
    """Copy bandwidth and rate of fp32 multiply-adds of this machine, measured beside the methods."""

    def __init__(self):
        self._source = torch.ones(64 << 20)
        self._target = torch.empty_like(self._source)
        self._matrix = torch.ones(1024, 1024)
        self._bandwidths: list[float] = []
        self._rates: list[float] = []

    def measure(self) -> None:
        """Takes a sample of both."""
        start = time.perf_counter()
        self._target.copy_(self._source)
        middle = time.perf_counter()
        self._matrix @ self._matrix
        end = time.perf_counter()
        self._bandwidths.append(2 * self._source.nbytes / (middle - start))
        self._rates.append(self._matrix.shape[0] ** 3 / (end - middle))

    @property
    def bandwidth(self) -> float:
        """Bytes per second, read and written ones counted."""
        # The first copy makes the target's pages.
        return statistics.median(self._bandwidths[1:])

    @property
    def rate(self) -> float:
        """Multiply-adds per second: the best seen, since a peak is asked for."""
        return max(self._rates)

    def judge(self, seconds: float, num_bytes: int, multiply_adds: int) -> dict:
        """How a time compares to what its bytes and multiply-adds take at least."""
        by_bytes, by_work = num_bytes / self.bandwidth, multiply_adds / self.rate
        return {
            "bytes_read": num_bytes,
            "multiply_adds": multiply_adds,
            "share_of_bandwidth": by_bytes / seconds,
            "share_of_multiply_adds": by_work / seconds,
            "limit": "bytes" if by_bytes >= by_work else "multiply-adds",
            "share_of_limit": max(by_bytes, by_work) / seconds,
        }

    def to_dict(self) -> dict:
        return {"copy_bandwidth": self.bandwidth, "multiply_add_rate": self.rate}


def machine_limits(samples: int = 7) -> dict:
    """`Limits` of a moment, as a dict."""
    limits = Limits()
    for _ in range(samples):
        limits.measure()
    return limits.to_dict()


def resident_bytes() -> int:
    """Memory of this process that is in use: what is free inside of the allocator is given back first (Linux)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc
        pass
    return _status("VmRSS")


def reset_peak() -> None:
    """Lets `peak_bytes` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory of this process since `reset_peak` (Linux)."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
