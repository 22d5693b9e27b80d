"""LongBench's metrics against values computed by hand, and its rows as prompts."""

import json

import evaluate
import pytest

from eval.errors import EvalError
from eval.longbench.data import make_samples
from eval.longbench.tasks import NOT_CHATS, TASKS, length_range
from eval.metrics import longbench, ruler


@pytest.mark.parametrize(
    ("task", "prediction", "references", "classes", "expected"),
    [
        # Two words of three and of two in common: 2 * 2 / (3 + 2), articles and punctuation left out.
        ("hotpotqa", "The red, big House!", ["a big house"], None, 0.8),
        ("hotpotqa", "nothing", ["something"], None, 0.0),
        ("narrativeqa", "blue", ["red", "the Blue"], None, 1.0),  # the best reference
        ("triviaqa", "\n\nParis\nQuestion: next", ["paris"], None, 1.0),  # the first line only
        ("2wikimqa", "a a b", ["a b b"], None, 2 / 3),  # "a" is an article: b against b b
        ("trec", "Other location, or City", ["City"], ["City", "Country", "Other location"], 0.5),
        ("trec", "City of God", ["City of God"], ["City", "City of God"], 1.0),  # a part of the right name is no miss
        ("trec", "Country", ["City"], ["City", "Country"], 0.0),
        ("trec", "City\nCountry", ["City"], ["City", "Country"], 1.0),
        ("passage_count", "There are 5 of 10.", ["5"], None, 0.5),
        ("passage_count", "none", ["5"], None, 0.0),
        ("passage_retrieval_en", "Paragraph 3, not 13", ["Paragraph 3"], None, 0.5),
        # The first line that has no comment; "ab" against "abc": 2 * 2 / 5.
        ("lcc", "\n# note\nab\nabc", ["abc"], None, 0.8),
        ("repobench-p", "```", ["abc"], None, 0.0),
        # Longest common subsequence 2 of 2 and 3 words: 2 * 1 * (2/3) / (1 + 2/3).
        ("gov_report", "the cat", ["the black cat"], None, 0.8),
        ("samsum", "", ["a b"], None, 0.0),
    ],
)
def test_longbench_metrics(task, prediction, references, classes, expected):
    assert longbench.score(task, prediction, references, classes) == pytest.approx(expected, abs=1e-6)


def test_ruler_metrics():
    assert ruler.score("all", "It is X1 and y2.", ["x1", "Y2", "z3", "w4"]) == 0.5
    assert ruler.score("part", "It is X1.", ["x1", "y2"]) == 1.0
    assert ruler.score("part", "It is.", ["x1", "y2"]) == 0.0


@pytest.mark.parametrize(
    ("module", "config", "expected"),
    [(ruler, "all", 75.0), (ruler, "part", 100.0), (longbench, "hotpotqa", 100 * (1 + 2 / 3) / 2)],
)
def test_metrics_are_modules_for_evaluate(module, config, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    metric = evaluate.load(module.__file__, config, cache_dir=str(tmp_path))
    predictions, references = ["one two", "x"], [["one", "two"], ["x", "y"]]
    if module is longbench:
        predictions, references = ["one two", "x"], [["one two"], ["x y"]]
    assert metric.compute(predictions=predictions, references=references)["score"] == pytest.approx(expected)
    with pytest.raises(ValueError, match="config_name"):
        evaluate.load(module.__file__, "nonsense", cache_dir=str(tmp_path))


def test_tasks_are_longbenchs():
    lengths = {name: task.max_new_tokens for name, task in TASKS.items()}
    assert lengths == {
        **dict.fromkeys(("gov_report", "qmsum", "multi_news"), 512),
        **dict.fromkeys(("narrativeqa", "qasper", "samsum"), 128),
        **dict.fromkeys(("multifieldqa_en", "trec", "lcc", "repobench-p"), 64),
        **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa"), 32),
        **dict.fromkeys(("passage_count", "passage_retrieval_en"), 32),
    }
    assert set(longbench.METRICS) == set(TASKS)
    for name, task in TASKS.items():
        fields = [part for part in ("{context}", "{input}") if part in task.prompt]
        assert fields[0] == "{context}" and ("{input}" in fields) == (
            name not in ("gov_report", "multi_news", "passage_count", "lcc")
        )
    assert [length_range(words) for words in (3999, 4000, 7999, 8000)] == ["0-4k", "4-8k", "4-8k", "8k+"]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


ROW = dict(input="what?", context=" ".join(f"w{i}" for i in range(50)), answers=["w1"], length=50, all_classes=None)


def samples(tokenizer, folder, tasks=("hotpotqa",), max_length=1000, by_length=False):
    return list(make_samples(tokenizer, str(folder), list(tasks), max_length, None, by_length, True))


def test_prompts_lose_their_middle(byte_tokenizer, tmp_path):
    write(tmp_path / "hotpotqa.jsonl", ROW)
    (whole,) = samples(byte_tokenizer, tmp_path)
    (cut,) = samples(byte_tokenizer, tmp_path, max_length=400)  # tokens are bytes
    chat = len(whole.input_ids) - len(TASKS["hotpotqa"].prompt.format(**ROW))
    assert chat > 0 and len(cut.input_ids) == 400 + chat
    text = byte_tokenizer.decode(cut.input_ids)
    assert "w25" in byte_tokenizer.decode(whole.input_ids) and "w25" not in text
    assert "The following are given passages.\nw0 w1 w2" in text and text.count("w49\n\nAnswer the question") == 1


def test_examples_are_not_chats_and_samsum_ends_with_its_line(byte_tokenizer, tmp_path):
    for name in (*NOT_CHATS, "qasper"):
        write(tmp_path / f"{name}.jsonl", ROW | {"all_classes": ["w1"]})
    made = {s.task: s for s in samples(byte_tokenizer, tmp_path, (*NOT_CHATS, "qasper"))}
    for name, sample in made.items():
        assert ("user" in byte_tokenizer.decode(sample.input_ids)) == (name == "qasper")
        assert bool(sample.stop_ids) == (name == "samsum")


def test_ranges_of_length_group_scores(byte_tokenizer, tmp_path):
    write(tmp_path / "hotpotqa.jsonl", ROW)
    write(tmp_path / "hotpotqa_e.jsonl", ROW, ROW | {"length": 5000}, ROW | {"length": 9000})
    made = samples(byte_tokenizer, tmp_path, by_length=True)
    assert [sample.length for sample in made] == ["0-4k", "4-8k", "8k+"]
    assert [sample.length for sample in samples(byte_tokenizer, tmp_path)] == ["all"]


def test_parquet_is_read_as_jsonl(byte_tokenizer, tmp_path):
    import datasets

    write(tmp_path / "hotpotqa.jsonl", ROW)
    (tmp_path / "other").mkdir()
    datasets.Dataset.from_list([ROW]).to_parquet(str(tmp_path / "other" / "hotpotqa.parquet"))
    assert samples(byte_tokenizer, tmp_path) == samples(byte_tokenizer, tmp_path / "other")


def test_missing_and_malformed_rows(byte_tokenizer, tmp_path):
    with pytest.raises(EvalError, match=r"has no hotpotqa\.jsonl or hotpotqa\.parquet; add it, or leave"):
        samples(byte_tokenizer, tmp_path)
    write(tmp_path / "trec.jsonl", ROW)
    with pytest.raises(EvalError, match=r"trec\.jsonl, line 1: field 'all_classes' is empty"):
        samples(byte_tokenizer, tmp_path, ["trec"])
    write(tmp_path / "passage_retrieval_en.jsonl", ROW | {"answers": ["7"]})
    with pytest.raises(EvalError, match=r"line 1: field 'answers' must be like 'Paragraph 7', got \['7'\]"):
        samples(byte_tokenizer, tmp_path, ["passage_retrieval_en"])
    with pytest.raises(EvalError, match=r"no folder .*nowhere"):
        samples(byte_tokenizer, tmp_path / "nowhere")
    for broken, message in (
        ({"answers": "w1"}, "field 'answers' must be a list, got 'w1'"),
        ({"answers": []}, "field 'answers' is empty"),
        ({"context": 3}, "field 'context' must be text, got 3"),
    ):
        write(tmp_path / "hotpotqa.jsonl", ROW, ROW | broken)
        with pytest.raises(EvalError, match=rf"hotpotqa\.jsonl, line 2: {message}"):
            samples(byte_tokenizer, tmp_path)
    write(tmp_path / "hotpotqa.jsonl", {k: v for k, v in ROW.items() if k != "input"})
    with pytest.raises(EvalError, match=r"line 1: no field 'input'; a row has input, context, answers, length"):
        samples(byte_tokenizer, tmp_path)
