"""Scores, bytes and intervals of a finished run."""

import statistics
from collections import defaultdict
from typing import Any

import numpy as np

RESULTS = "results.json"
RESAMPLES = 10_000


def summarize(records: list[dict], methods: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """The content of `results.json`.

    `average` is the mean over lengths of the mean over tasks, in percent. `loss` is full's average less the method's,
    with a paired bootstrap interval of 95 %: the same samples for both, resampled within every task and length.
    """
    cells: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        cells[record["length"], record["task"]].append(record)
    lengths = sorted({length for length, _ in cells}, key=str)
    weights = {
        (length, task): 1 / len(lengths) / sum(1 for other, _ in cells if other == length) for length, task in cells
    }
    result = {"n": len(records), **settings, "methods": {}}
    tokens = sum(record["prompt_tokens"] for record in records)
    for name in methods:

        def scores(cell: tuple, method: str = name) -> np.ndarray:
            return np.array([record["methods"][method]["score"] for record in cells[cell]])

        average = 100 * sum(weight * scores(cell).mean() for cell, weight in weights.items())
        full = 100 * sum(weight * scores(cell, "full").mean() for cell, weight in weights.items())
        held = sum(record["methods"][name]["bytes"] for record in records)
        divergences = [record["methods"][name]["kl"] for record in records]
        divergences = [kl for kl in divergences if kl is not None]
        low, high = _interval({cell: 100 * (scores(cell, "full") - scores(cell)) for cell in cells}, weights)
        result["methods"][name] = {
            "average": average,
            "bytes_per_token": held / tokens,
            "ratio": sum(record["bytes_bf16"] for record in records) / held,
            "kl": statistics.fmean(divergences) if divergences else None,
            "loss": {
                "points": full - average,
                "percent_of_full": 100 * (full - average) / full if full else 0.0,
                "points_interval_95": [low, high],
            },
            "tasks": {
                task: 100 * float(np.concatenate([scores(cell) for cell in cells if cell[1] == task]).mean())
                for task in dict.fromkeys(task for _, task in cells)
            },
            "lengths": {
                str(length): {
                    "average": 100 * statistics.fmean(scores(cell).mean() for cell in cells if cell[0] == length),
                    "ratio": _ratio([record for cell in cells if cell[0] == length for record in cells[cell]], name),
                }
                for length in lengths
            },
        }
    return result


def _ratio(records: list[dict], method: str) -> float:
    return sum(r["bytes_bf16"] for r in records) / sum(r["methods"][method]["bytes"] for r in records)


def _interval(differences: dict[tuple, np.ndarray], weights: dict[tuple, float]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    total = np.zeros(RESAMPLES)
    for cell, values in differences.items():
        picks = rng.integers(len(values), size=(RESAMPLES, len(values)))
        total += weights[cell] * values[picks].mean(1)
    low, high = np.percentile(total, [2.5, 97.5])
    return float(low), float(high)
