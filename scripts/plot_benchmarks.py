"""Draws the recorded benchmarks: speedup and memory against context. What has not been recorded is left out.

    python scripts/plot_benchmarks.py --results benchmarks --out docs

Reads every JSON file of the folder that `bench_attention.py` or `bench_decode.py` has written, and makes
`speedup.png` (decode attention of one layer, and time between tokens of a whole model) and `memory.png` (bytes of
K and V as the process holds them).
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_BASELINES = {
    "speedup_vs_transformers": ("Transformers' attention call", "#1f77b4"),
    "speedup_vs_best_sdpa": ("fastest dense attention", "#2ca02c"),
    "speedup_vs_sequence_only": ("token selection only", "#ff7f0e"),
}
_METHODS = {
    "dynamic": ("DynamicCache (fp32)", "#1f77b4"),
    "quantized": ("QuantizedCache (4 bits)", "#ff7f0e"),
    "mosaic": ("MosaicKVCache", "#d62728"),
}
# Pixels enough for any screen, and still a small file.
STYLE = {
    "figure.dpi": 160,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of JSON files")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures")
    parser.add_argument("--geometry", default="llama-3.1-8b", help="geometry of the attention to draw")
    parser.add_argument("--model-geometry", default="qwen3-0.6b", help="geometry of the whole model to draw")
    parser.add_argument("--preset", default="default", help="preset to draw")
    args = parser.parse_args()

    records = load(args.results, args.preset)
    attention = [r for r in records if r["benchmark"] == "attention" and r["geometry"] == args.geometry]
    attention = [r for r in attention if r["batch"] == 1 and r["attended"] is None]
    decode = [r for r in records if r["benchmark"] == "decode" and r["geometry"] == args.model_geometry]
    args.out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        draw_speedup(attention, decode, args.out / "speedup.png")
        draw_memory(decode, args.out / "memory.png")


def load(folder: Path, preset: str) -> list[dict]:
    """All records of the benchmarks with this preset."""
    records = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        records += content if isinstance(content, list) else [content]
    return [r for r in records if isinstance(r, dict) and "benchmark" in r and r.get("preset") == preset]


def draw_speedup(attention: list[dict], decode: list[dict], path: Path) -> None:
    """Left the attention of one layer, right a whole model."""
    panels = [panel for panel in ((draw_attention, attention), (draw_tbt, decode)) if panel[1]]
    if not panels:
        print("No attention or decode results: no speedup.png.")
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), squeeze=False)
    for axis, (draw, records) in zip(axes[0], panels):
        draw(axis, records)
    save(figure, path)


def draw_attention(axis, records: list[dict]) -> None:
    for key, (label, color) in _BASELINES.items():
        points = by_context(records, lambda r, key=key: r.get(key))
        if points:
            draw_line(axis, points, f"over {label}", color)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_yscale("log", base=2)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 6)  # room for the legend
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}x")
    label_contexts(axis, records)
    axis.set_title(f"Decode attention, one layer ({records[0]['geometry']})", fontsize=9)
    axis.set_ylabel("speedup of MosaicKV")
    axis.legend(fontsize=8)


def draw_tbt(axis, records: list[dict]) -> None:
    draw_methods(axis, records, "tbt_median_ms", 1.0)
    axis.set_title(f"Time between tokens ({records[0]['geometry']})", fontsize=9)
    axis.set_ylabel("milliseconds, median")


def draw_memory(decode: list[dict], path: Path) -> None:
    if not decode:
        print("No decode results: no memory.png.")
        return
    figure, axis = plt.subplots(figsize=(4.2, 3.2))
    draw_methods(axis, decode, "process_growth_bytes", 1e-6)
    points = by_context(decode, lambda r: r.get("kv_bytes_bf16", 0) / 1e6)
    axis.plot(*zip(*points), color="gray", linestyle="--", linewidth=1, label="K and V as bf16")
    axis.set_title(f"Memory of K and V in the process ({decode[0]['geometry']})", fontsize=9)
    axis.set_ylabel("MB")
    axis.legend(fontsize=8)
    save(figure, path)


def draw_methods(axis, records: list[dict], key: str, unit: float) -> None:
    """A line for every method that some record has."""
    for method, (label, color) in _METHODS.items():
        points = by_context(records, lambda r, m=method: r["methods"].get(m, {}).get(key))
        if points:
            draw_line(axis, [(context, value * unit) for context, value in points], label, color)
    axis.set_ylim(bottom=0)
    label_contexts(axis, records)
    axis.legend(fontsize=8)


def by_context(records: list[dict], value) -> list[tuple[int, float]]:
    """`(context, value)`, the shortest context first; of records with equal contexts the last counts."""
    points = {record["context"]: value(record) for record in records}
    return sorted((context, y) for context, y in points.items() if y is not None)


def draw_line(axis, points: list[tuple[int, float]], label: str, color: str) -> None:
    axis.plot(*zip(*points), marker="o", markersize=4, color=color, label=label)


def label_contexts(axis, records: list[dict]) -> None:
    contexts = sorted({record["context"] for record in records})
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in contexts])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("tokens in the cache")


def save(figure, path: Path) -> None:
    figure.tight_layout()
    # Without the version of matplotlib in it, equal data give equal files.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    main()
