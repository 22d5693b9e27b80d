"""Tables and plots of finished runs: `python -m eval.report DIR [DIR ...] --out DIR`."""

import argparse
import json
import sys
from pathlib import Path

from .results import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help=f"folders with a {RESULTS}, or such files")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.md and the plots")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = ["# Evaluation\n"]
    for path in args.runs:
        path = path / RESULTS if path.is_dir() else path
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            print(f"error: {path} is no results file: {error}", file=sys.stderr)
            sys.exit(2)
        name = path.parent.name if path.name == RESULTS else path.stem
        parts += [f"## {results['benchmark']}, {results['model']}\n", table(results) + "\n", _made(results) + "\n"]
        for title, file in plots(results, args.out, name).items():
            parts.append(f"![{title}]({file})\n")
    (args.out / "report.md").write_text("\n".join(parts), encoding="utf-8")
    print(args.out / "report.md")


def table(results: dict) -> str:
    """A Markdown table: methods by scores, bytes and loss."""
    lines = [
        "| method | average | loss, points (95 %) | KL | bytes a token | ratio to bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, method in results["methods"].items():
        loss = method["loss"]
        low, high = loss["points_interval_95"]
        kl = "" if method["kl"] is None else f"{method['kl']:.4f}"
        lines.append(
            f"| {name} | {method['average']:.2f} | {loss['points']:.2f} ({low:.2f} to {high:.2f}) | {kl} "
            f"| {method['bytes_per_token']:,.0f} | {method['ratio']:.2f} |"
        )
    methods = list(results["methods"])
    lines += ["", "| task | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    for task in next(iter(results["methods"].values()))["tasks"]:
        scores = " | ".join(f"{results['methods'][name]['tasks'][task]:.1f}" for name in methods)
        lines.append(f"| {task} | {scores} |")
    return "\n".join(lines)


def plots(results: dict, folder: Path, name: str) -> dict[str, str]:
    """Draws score against bytes, score against length, and scores by task; file names by title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = results["methods"]
    files = {}

    def save(title: str, suffix: str) -> None:
        file = f"{name}-{suffix}.svg"
        pyplot.title(f"{results['benchmark']}, {results['model']}: {title}", fontsize=10)
        pyplot.tight_layout()
        pyplot.savefig(folder / file, metadata={"Date": None})
        pyplot.close()
        files[title] = file

    pyplot.figure(figsize=(6, 4))
    for label, method in methods.items():
        pyplot.scatter(method["bytes_per_token"], method["average"])
        place = (method["bytes_per_token"], method["average"])
        pyplot.annotate(label, place, xytext=(4, 4), textcoords="offset points")
    pyplot.xlabel("bytes a token")
    pyplot.ylabel("average score")
    save("score against memory", "bytes")

    lengths = list(next(iter(methods.values()))["lengths"])
    if len(lengths) > 1:
        pyplot.figure(figsize=(6, 4))
        for label, method in methods.items():
            pyplot.plot(lengths, [method["lengths"][length]["average"] for length in lengths], "o-", label=label)
        pyplot.xlabel("length")
        pyplot.ylabel("average score")
        pyplot.legend()
        save("score against length", "lengths")

    tasks = list(next(iter(methods.values()))["tasks"])
    pyplot.figure(figsize=(1.5 + 0.6 * len(tasks), 1.5 + 0.4 * len(methods)))
    scores = [[method["tasks"][task] for task in tasks] for method in methods.values()]
    pyplot.imshow(scores, vmin=0, vmax=100, aspect="auto", cmap="viridis")
    for row, of_method in enumerate(scores):
        for column, score in enumerate(of_method):
            pyplot.text(column, row, f"{score:.0f}", ha="center", va="center", color="white" if score < 60 else "black")
    pyplot.xticks(range(len(tasks)), tasks, rotation=45, ha="right")
    pyplot.yticks(range(len(methods)), list(methods))
    save("scores by task", "tasks")
    return files


def _made(results: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    seed = f"seeds from {results['seed']}, " if "seed" in results else ""
    return f"{results['n']} samples, {seed}commit {results['commit']}, {versions}, {results['machine']['cpu']}."


if __name__ == "__main__":
    main()
