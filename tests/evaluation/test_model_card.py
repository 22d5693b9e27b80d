"""The model card: valid metadata, and no number that is not in a results file."""

import json
import random
import re

import pytest
from huggingface_hub import ModelCard
from make_model_card import make

from eval.results import summarize


def record(benchmark, length, task, rng):
    methods = {}
    for name, held in (("full", 92160.0), ("default", 20480.0 + rng.randrange(999)), ("quest", 97920.0)):
        methods[name] = {"score": rng.random(), "kl": 0.0 if name == "full" else rng.random() / 9, "bytes": held}
    return {"length": length, "task": task, "methods": methods, "prompt_tokens": 2, "bytes_bf16": 92160}


def evaluation(benchmark, lengths, tasks):
    rng = random.Random(benchmark)
    records = [record(benchmark, length, task, rng) for length in lengths for task in tasks for _ in range(3)]
    settings = dict(benchmark=benchmark, model="m", dtype="float32", commit="abc", versions={"transformers": "5.24.0"})
    return summarize(records, ["full", "default", "quest"], settings)


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    decode = dict(benchmark="decode", preset="default", geometry="qwen3-0.6b", context=32768)
    decode["machine"] = {"threads": 2, "cpu": "some CPU"}
    decode["methods"] = {
        "dynamic": {"tbt_median_ms": 5833.4175, "process_growth_bytes": 7519313920},
        "mosaic": {"tbt_median_ms": 308.0069, "process_growth_bytes": 815026176},
    }
    files = {
        "ruler/results.json": evaluation("ruler", [2048, 4096], ["vt", "cwe"]),
        "longbench_small.json": evaluation("longbench", ["all"], ["qasper", "lcc"]),
        "decode.json": decode,
        "other.json": {"benchmark": "decode", "preset": "paper"},
        "list.json": [1, 2],
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def numbers(content):
    if isinstance(content, dict):
        return [n for key, value in content.items() for n in (*numbers(key), *numbers(value))]
    if isinstance(content, list):
        return [n for value in content for n in numbers(value)]
    if isinstance(content, str):
        return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", content)]
    return [float(content)] if isinstance(content, (int, float)) else []


def test_the_card(results, tmp_path):
    out = tmp_path / "card"
    make("me/model", results, out, "default")
    card = ModelCard.load(out / "README.md")
    metadata = card.data.to_dict()
    expected = {"base_model": "me/model", "library_name": "transformers", "pipeline_tag": "text-generation"}
    assert expected.items() <= metadata.items()
    ruler = json.loads((results / "ruler/results.json").read_text())["methods"]["default"]["lengths"]
    found = {(e.dataset_type, e.dataset_name): e.metric_value for e in card.data.eval_results}
    assert found["ruler", "RULER, 4096"] == round(ruler["4096"]["average"], 2)
    assert len(found) == 3
    for part in (
        "## Use",
        'from_pretrained("me/model")',
        "## RULER",
        "## LongBench",
        "## Memory and speed",
        "## Limits",
    ):
        assert part in card.text
    for image in re.findall(r"!\[.*?\]\((.*?)\)", card.text):
        assert (out / image).is_file()


def test_every_number_stands_in_a_results_file(results, tmp_path):
    make("me/model", results, tmp_path / "card", "default")
    known = [n for path in results.rglob("*.json") for n in numbers(json.loads(path.read_text()))]
    known += [n / 1e6 for n in known]  # bytes are shown as MB
    text = ModelCard.load(tmp_path / "card" / "README.md").text
    text = re.sub(r"```.*?```|!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL).replace("(95 %)", "").replace("bf16", "")
    shown = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w.]*\.\d)", text)
    assert len(shown) > 60
    for number in shown:
        digits = len(number.partition(".")[2])
        value = float(number.replace(",", ""))
        assert any(abs(value - n) <= 0.5001 * 10**-digits for n in known), number


def test_what_is_missing_is_told(results, tmp_path):
    with pytest.raises(ValueError, match="no method 'paper', only full, default, quest"):
        make("me/model", results, tmp_path / "card", "paper")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no results"):
        make("me/model", tmp_path / "empty", tmp_path / "card", "default")
    assert not (tmp_path / "card").exists()
