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
    """Markdown tables: methods by scores, bytes and loss, then by task, for each length."""
    methods = results["methods"]
    lines = [
        "| method | average | loss, percent of full (95 %) | KL | bytes a token | ratio to bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, method in methods.items():
        loss, interval = method["loss"]["percent"], method["loss"]["percent_interval_95"]
        shown = "" if loss is None else f"{loss:.2f}"
        shown += f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        kl = "" if method["kl"] is None else f"{method['kl']:.4f}"
        lines.append(
            f"| {name} | {method['average']:.2f} | {shown} | {kl} "
            f"| {method['bytes_per_token']:,.0f} | {method['ratio']:.2f} |"
        )
    for length in methods["full"]["lengths"]:
        lines += ["", f"| task, length {length} | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
        for task in methods["full"]["lengths"][length]["tasks"]:
            scores = (method["lengths"][length]["tasks"][task] for method in methods.values())
            lines.append(f"| {task} | " + " | ".join(f"{score:.1f}" for score in scores) + " |")
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

    lengths = list(methods["full"]["lengths"])
    if len(lengths) > 1:
        pyplot.figure(figsize=(6, 4))
        places = [int(length) for length in lengths] if all(map(str.isdigit, lengths)) else range(len(lengths))
        for label, method in methods.items():
            pyplot.plot(places, [method["lengths"][length]["average"] for length in lengths], "o-", label=label)
        pyplot.xticks(places, lengths)
        pyplot.xlabel("length")
        pyplot.ylabel("average score")
        pyplot.legend()
        save("score against length", "lengths")

    tasks = list(methods["full"]["tasks"])
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
    where = f"{results['device']}, {results['machine']['cpu']}"
    return f"{results['n']} samples, {seed}commit {results['commit']}, {versions}, {where}."


if __name__ == "__main__":
    main()
