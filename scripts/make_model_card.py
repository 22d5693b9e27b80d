"""Writes a model card that shows a model with MosaicKVCache, from recorded results and nothing else.

    python scripts/make_model_card.py --model Qwen/Qwen3-0.6B --results runs --out card

Takes every JSON file below `--results`: those of `eval.ruler` and `eval.longbench` become `EvalResult` metadata, tables
and plots, those of `bench_decode.py` a table of memory and speed.
"""

import argparse
import json
import sys
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval import report

_NAMES = {"ruler": "RULER", "longbench": "LongBench"}
_USAGE = """
## Use

```python
from mosaickv_hf import MosaicKVCache
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{model}")
model = AutoModelForCausalLM.from_pretrained("{model}")
inputs = tokenizer("A long document ...", return_tensors="pt")
cache = MosaicKVCache({preset})
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=100)
print(cache.stats())
```
"""
_LIMITS = """
## Limits

- Decoding gets faster and smaller, prefill does not: the prompt is attended to exactly, then packed.
- Prompts below a few hundred tokens stay as they are, and the first and newest tokens always do.
- The scores above are of this model and these benchmarks; answers flip where the full cache is undecided itself.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model's Hub id")
    parser.add_argument("--results", type=Path, required=True, help="folder with results files")
    parser.add_argument("--out", type=Path, required=True, help="folder for README.md and its plots")
    parser.add_argument("--method", default="default", help="the preset that the card is about (default: default)")
    args = parser.parse_args()
    try:
        make(args.model, args.results, args.out, args.method)
    except ValueError as error:
        parser.error(str(error))


def make(model: str, results: Path, out: Path, method: str) -> ModelCard:
    """Writes the card and its plots into a folder.

    Args:
        model: Hub id.
        results: folder that is searched for results files.
        method: the preset that the metadata are about.

    Raises:
        ValueError: no results of an evaluation, or none of this method.
    """
    files = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.rglob("*.json"))}
    files = {path: result for path, result in files.items() if isinstance(result, dict)}
    evaluations = {path: r for path, r in files.items() if r.get("benchmark") in _NAMES}
    decodes = [r for r in files.values() if r.get("benchmark") == "decode" and r.get("preset") == method]
    if not evaluations:
        raise ValueError(f"{results} holds no results of eval.ruler or eval.longbench")
    for path, result in evaluations.items():
        if method not in result["methods"]:
            raise ValueError(f"{path} has no method {method!r}, only {', '.join(result['methods'])}")
    out.mkdir(parents=True, exist_ok=True)
    data = ModelCardData(
        base_model=model,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mosaickv", "kv-cache", "long-context"],
        model_name=f"{model.split('/')[-1]} with MosaicKVCache",
        eval_results=[e for result in evaluations.values() for e in _metadata(result, method)],
    )
    parts = [
        f"# {model} with a MosaicKVCache\n",
        _USAGE.format(model=model, preset="" if method == "default" else repr(method)),
    ]
    for path, result in evaluations.items():
        name = path.parent.name if path.name == "results.json" else path.stem
        parts += [f"## {_NAMES[result['benchmark']]}\n", report.table(result) + "\n", _said(result)]
        parts += [f"![{title}]({file})\n" for title, file in report.plots(result, out, name).items()]
    if decodes:
        parts += ["## Memory and speed\n", _speed(decodes)]
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(parts) + _LIMITS)
    card.save(out / "README.md")
    return card


def _metadata(result: dict, method: str) -> list[EvalResult]:
    """One `EvalResult` a length."""
    benchmark = result["benchmark"]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=benchmark,
            dataset_name=f"{_NAMES[benchmark]}, {length}",
            dataset_config=length,  # what tells results of one benchmark apart
            metric_type="score",
            metric_name=f"average score, {method}",
            metric_value=round(of_length["average"], 2),
        )
        for length, of_length in result["methods"][method]["lengths"].items()
    ]


def _said(result: dict) -> str:
    """What the numbers are and how they came about."""
    lines = [f"{result['n']} samples of {result['model']} in {result['dtype']}; `full` is `DynamicCache`."]
    if result.get("commit"):
        lines.append(f"Commit {result['commit']}, Transformers {result['versions']['transformers']}.")
    return " ".join(lines) + "\n"


def _speed(decodes: list[dict]) -> str:
    lines = ["| geometry | tokens | cache | time between tokens | memory of K and V |", "|---|---|---|---|---|"]
    for result in sorted(decodes, key=lambda r: (r["geometry"], r["context"])):
        for name, method in result["methods"].items():
            lines.append(
                f"| {result['geometry']} | {result['context']} | {name} | {method['tbt_median_ms']:.1f} ms "
                f"| {method['process_growth_bytes'] / 1e6:.0f} MB |"
            )
    machine = decodes[0]["machine"]
    lines.append(f"\nRandom weights, synthetic K and V, {machine['threads']} threads of {machine['cpu']}.\n")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
