"""What the soak test concludes from its readings: it must neither cry wolf nor miss a leak."""

import math

import numpy
import pytest
from soak import drift

BINS, SECONDS = 48, 10.0  # as in its eight minutes after the warm-up
STEP = 20e3  # bytes by which memory moves from bin to bin in recorded runs (standard deviation)
RUNS = 1000


def readings(generator, memory: float, leak: float = 0.0) -> list[tuple[float, float]]:
    """Bins of a process whose moves are kept by the share `memory`, 1 for a random walk, and that leaks bytes a bin."""
    size, points = 0.0, []
    for i in range(BINS):
        size = memory * size + generator.normal(0, STEP)
        points.append((SECONDS * i, 400e6 + size + leak * i))
    return points


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9, 1.0])
def test_a_flat_process_is_called_flat(memory):
    generator = numpy.random.default_rng(0)
    intervals = [drift(readings(generator, memory))[1:] for _ in range(RUNS)]
    covered = sum(low <= 0 <= high for low, high in intervals)
    assert covered >= 0.95 * RUNS - 3 * math.sqrt(0.95 * 0.05 * RUNS)


def test_a_leak_is_seen():
    # On an idle machine ten seconds are about 18 calls: this is a kilobyte a call.
    generator = numpy.random.default_rng(0)
    seen = sum(drift(readings(generator, 1.0, leak=18 * 1024))[1] > 0 for _ in range(RUNS))
    assert seen >= 0.99 * RUNS
