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
    `ahead_of` the method's less another's, with paired bootstrap intervals of 95 %: the same samples for both,
    resampled within every task and length.
    """
    cells: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        cells[record["length"], record["task"]].append(record)
    lengths = sorted({length for length, _ in cells}, key=lambda length: (isinstance(length, str), length))
    weights = {
        (length, task): 1 / len(lengths) / sum(1 for other, _ in cells if other == length) for length, task in cells
    }
    scores = {
        name: {
            cell: np.array([100 * record["methods"][name]["score"] for record in of_cell])
            for cell, of_cell in cells.items()
        }
        for name in methods
    }
    averages = {name: sum(weights[cell] * s.mean() for cell, s in scores[name].items()) for name in methods}
    full = averages["full"]

    def difference(name: str, other: str) -> dict[str, Any]:
        interval = _interval({cell: scores[name][cell] - scores[other][cell] for cell in cells}, weights)
        return {"points": averages[name] - averages[other], "points_interval_95": interval}

    result = {"n": len(records), **settings, "methods": {}}
    for name in methods:
        divergences = [record["methods"][name]["kl"] for record in records]
        divergences = [kl for kl in divergences if kl is not None]
        loss = difference("full", name)
        interval = loss["points_interval_95"]
        result["methods"][name] = {
            "average": averages[name],
            **_bytes(records, name),
            "kl": statistics.fmean(divergences) if divergences else None,
            "loss": {
                **loss,
                "percent": 100 * loss["points"] / full if full else None,
                "percent_interval_95": [100 * x / full for x in interval] if full and interval else None,
            },
            "ahead_of": {other: difference(name, other) for other in methods if other != name},
            "tasks": {
                task: float(np.concatenate([s for cell, s in scores[name].items() if cell[1] == task]).mean())
                for task in dict.fromkeys(task for _, task in cells)
            },
            "lengths": {
                str(length): {
                    "average": statistics.fmean(s.mean() for cell, s in scores[name].items() if cell[0] == length),
                    **_bytes([record for cell in cells if cell[0] == length for record in cells[cell]], name),
                    "tasks": {cell[1]: s.mean() for cell, s in scores[name].items() if cell[0] == length},
                }
                for length in lengths
            },
        }
    return result


def _bytes(records: list[dict], method: str) -> dict[str, float]:
    held = sum(record["methods"][method]["bytes"] for record in records)
    return {
        "bytes_per_token": held / sum(record["prompt_tokens"] for record in records),
        "ratio": sum(record["bytes_bf16"] for record in records) / held,
    }


def _interval(differences: dict[tuple, np.ndarray], weights: dict[tuple, float]) -> list[float] | None:
    """Of the weighted sum of the cells' means; None where a cell has one sample, which says nothing of its spread."""
    if any(len(values) == 1 for values in differences.values()):
        return None
    rng = np.random.default_rng(0)
    total = np.zeros(RESAMPLES)
    for cell, values in differences.items():
        means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
        # Resampling n values has n - 1 over n of the variance of their mean.
        total += weights[cell] * (values.mean() + (means - values.mean()) * (len(values) / (len(values) - 1)) ** 0.5)
    return np.percentile(total, [2.5, 97.5]).tolist()
