"""The evaluation's runner, its methods and its reports, on a small random model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import CACHE
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from eval import report
from eval.baselines.quest import PAGE_SIZE, QuestCache, chosen_tokens
from eval.baselines.think import RECENT_TOKENS, ThinkCache
from eval.decoding import Decoder
from eval.errors import EvalError
from eval.methods import NAMES, Prefill, held_bytes, make_methods, prefill_cache
from eval.results import summarize
from eval.ruler.__main__ import main, parser, samples, settings
from eval.samples import Sample
from mosaickv_hf import MosaicKVCache, MosaicKVConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        eos_token_id=256,
        pad_token_id=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tiny, byte_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


def arguments(folder, out, **kwargs):
    options = dict(
        model=folder,
        out=out,
        lengths="1000,1200",
        tasks="fwe",
        samples=2,
        methods="full,lossless,default",
    )
    options.update(kwargs)
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def call(monkeypatch, *given, **kwargs):
    monkeypatch.setattr(sys, "argv", ["eval.ruler", *arguments(*given, **kwargs)])
    main(parser(), "ruler", samples, settings)


def prompts(count, length=600):
    generator = torch.Generator().manual_seed(count)
    return [
        Sample(
            id=f"t/{i}",
            task="t",
            length="all",
            input_ids=torch.randint(0, 256, (length - 37 * i,), generator=generator).tolist(),
            answers=["x"],
            max_new_tokens=12,
            metric=("ruler", "all"),
        )
        for i in range(count)
    ]


def prefill(model, sample):
    cache = prefill_cache()
    ids = torch.tensor([sample.input_ids])
    model(ids, **{CACHE: cache})
    return Prefill(cache, model.config)


def test_answers_are_those_of_generate_and_kl_is_that_of_full_tokens(tiny):
    methods = make_methods(["full", "lossless", "paper"])
    (sample,) = prompts(1)
    answers = {name: a[0] for name, a in Decoder(tiny, 256).answer([sample], methods).items()}
    ids = torch.tensor([sample.input_ids])
    for name, cache in (("full", DynamicCache()), ("paper", MosaicKVCache("paper"))):
        expected = tiny.generate(ids, **{CACHE: cache}, max_new_tokens=12, do_sample=False, eos_token_id=-1)
        assert answers[name].tokens == expected[0, ids.shape[1] :].tolist()
    assert answers["lossless"].tokens == answers["full"].tokens and answers["lossless"].kl < 1e-6
    assert answers["paper"].tokens != answers["full"].tokens  # or the case below is not put to the test
    full, paper = (methods[name](prefill(tiny, sample)) for name in ("full", "paper"))
    divergences = []
    for token in answers["full"].tokens[:-1]:  # the last one is not fed
        truth, ours = (
            tiny(torch.tensor([[token]]), **{CACHE: cache}).logits[0, -1].log_softmax(-1) for cache in (full, paper)
        )
        divergences.append(float((truth.exp() * (truth - ours)).sum()))
    assert answers["paper"].kl == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)
    # K and V of 2 heads of 32 channels in 3 layers, 2 bytes each.
    assert answers["full"].bytes == answers["full"].bytes_bf16 == 600 * 3 * 2 * 2 * 32 * 2


def test_answers_end_with_the_stop_token_and_are_not_empty(tiny):
    (sample,) = prompts(1)
    methods = make_methods(["full"])
    whole = Decoder(tiny, 256).answer([sample], methods)["full"][0].tokens
    stop = whole[3]
    stopped = Sample(**{**vars(sample), "stop_ids": (stop,)})
    assert Decoder(tiny, 256).answer([stopped], methods)["full"][0].tokens == whole[: whole.index(stop)]
    at_once = Sample(**{**vars(sample), "stop_ids": (whole[0],)})
    answer = Decoder(tiny, 256).answer([at_once], methods)["full"][0].tokens
    assert answer and whole[0] not in answer


def test_a_padded_batch_gives_the_answers_of_single_prompts(tiny):
    batch = prompts(3)
    methods = make_methods(["full", "lossless", "default", "quest", "think"])
    together = Decoder(tiny, 256).answer(batch, methods)
    alone = [Decoder(tiny, 256).answer([sample], methods) for sample in batch]
    for name in ("full", "lossless", "default"):
        for row, own in enumerate(alone):
            # In a batch the last bits differ, and with them what is rounded up or down.
            if name != "default":
                assert together[name][row].tokens == own[name][0].tokens
            expected = own[name][0].kl
            assert together[name][row].kl == (expected and pytest.approx(expected, rel=0.02, abs=1e-6))
        # A batch's bytes are shared out by tokens, so only all rows together take what they take alone.
        held = sum(answer.bytes for answer in together[name])
        assert held == pytest.approx(sum(own[name][0].bytes for own in alone), rel=0.01)


def test_quest_chooses_the_pages_that_its_bounds_say(tiny):
    (sample,) = prompts(1)
    raw = prefill(tiny, sample)
    cache = QuestCache(raw.cache.to_dynamic_cache())
    keys = cache.layers[2].keys.float()
    query = torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(0))
    chosen = chosen_tokens(query, cache.layers[2].bounds, keys.shape[2])
    for head in range(4):
        pages = keys[0, head // 2, : 600 // PAGE_SIZE * PAGE_SIZE].unflatten(0, (-1, PAGE_SIZE))
        bounds = [
            sum(max(q * p[:, c].min(), q * p[:, c].max()) for c, q in enumerate(query[0, head, 0])) for p in pages
        ]
        best = torch.tensor(bounds).topk(4).indices  # a tenth of 600 tokens
        expected = {int(page) * PAGE_SIZE + i for page in best for i in range(PAGE_SIZE)} | set(range(592, 600))
        assert set(chosen[0, head, 0].nonzero()[:, 0].tolist()) == expected
    # Bounds of pages that fill up later are those of all their keys.
    cache.layers[2].update(torch.randn(1, 2, 8, 32), torch.randn(1, 2, 8, 32))
    assert torch.equal(cache.layers[2].bounds[0, :, :, -1], cache.layers[2].keys[:, :, 592:608].amin(2))
    assert held_bytes(cache) > 1.06 * held_bytes(raw.cache.to_dynamic_cache())


def test_quest_takes_a_tenth_of_each_row(tiny):
    bounds = torch.randn(2, 2, 2, 40, 32)
    mask = torch.ones(2, 1, 1, 650, dtype=torch.bool)
    mask[1, ..., :400] = False
    chosen = chosen_tokens(torch.randn(2, 4, 1, 32), bounds, 650, mask)
    # Pages of 650 and of 250 tokens, and the ten tokens that fill no page yet.
    assert (chosen.sum(-1) == torch.tensor([5, 2])[:, None, None] * PAGE_SIZE + 10).all()
    assert not chosen[1, ..., :400].any()


def test_quest_decodes_with_the_chosen_pages_only(tiny):
    (sample,) = prompts(1)
    decoder, mask, token = Decoder(tiny, 256), torch.ones(1, 601, dtype=torch.long), torch.tensor([5])

    def logits(change):
        cache = QuestCache(prefill(tiny, sample).cache.to_dynamic_cache())
        change(cache.layers[2])
        return decoder.step(cache, mask, token)

    def spoil(layer):
        # Bounds that promise nothing: the first pages are not chosen, so their values may be anything.
        layer.bounds[:, :, :, :20] = 0
        layer.bounds[:, :, :, 20:] = torch.tensor([-9.0, 9.0]).view(2, 1, 1, 1, 1)

    def spoil_values_too(layer):
        spoil(layer)
        layer.values[:, :, : 20 * PAGE_SIZE] = 1e4

    assert torch.equal(logits(spoil), logits(spoil_values_too))
    assert not torch.allclose(logits(spoil), logits(lambda layer: None), atol=1e-3)
    assert tiny.config._attn_implementation == "sdpa"


def test_think_drops_the_channels_that_queries_do_not_need(tiny):
    (sample,) = prompts(1)
    raw = prefill(tiny, sample)
    full = raw.cache.to_dynamic_cache()
    cache = ThinkCache(full, [layer.queries for layer in raw.cache.layers])
    assert cache.get_seq_length() == 600
    for layer, dense, source in zip(cache.layers, full.layers, raw.cache.layers):
        queries, keys = source.queries[0], dense.keys[0]
        assert queries.shape == (2, 2, 32, 32)
        for head in range(2):
            norms = queries[head].flatten(0, 1).norm(dim=0) * keys[head].norm(dim=0)
            assert set(layer.kept[0, head].nonzero()[:, 0].tolist()) == set(norms.topk(16).indices.tolist())
        got, values = layer.update(torch.ones(1, 2, 1, 32), torch.ones(1, 2, 1, 32))
        assert torch.equal(got[:, :, 600:], torch.ones(1, 2, 1, 32)) and values.shape == (1, 2, 601, 32)
        whole = dense.keys.bfloat16().float()
        assert torch.equal(got[:, :, 600 - RECENT_TOKENS : 600], whole[:, :, 600 - RECENT_TOKENS :])
        old = whole[:, :, : 600 - RECENT_TOKENS] * layer.kept[:, :, None]
        assert torch.equal(got[:, :, : 600 - RECENT_TOKENS], old)


def test_a_run_is_recorded_and_goes_on(folder, tmp_path, monkeypatch, capsys):
    call(monkeypatch, folder, tmp_path / "a", methods="full,lossless", samples=1)
    first = json.loads((tmp_path / "a/results.json").read_text())
    assert first["n"] == 2 and first["seed"] == 1000 and {"commit", "versions", "machine"} <= set(first)
    assert "| lossless | " in capsys.readouterr().out
    # More samples and another method: nothing is answered twice.
    call(monkeypatch, folder, tmp_path / "a", methods="full,lossless,default")
    lines = [json.loads(line) for line in (tmp_path / "a/predictions.jsonl").read_text().splitlines()]
    assert lines[0]["settings"]["seed"] == 1000 and len({line["id"] for line in lines[1:]}) == len(lines[1:]) == 4
    call(monkeypatch, folder, tmp_path / "b")
    assert (tmp_path / "a/results.json").read_text() == (tmp_path / "b/results.json").read_text()
    results = json.loads((tmp_path / "b/results.json").read_text())["methods"]
    assert results["lossless"]["average"] == results["full"]["average"] and results["lossless"]["kl"] < 1e-6
    assert set(results["full"]["tasks"]) == {"fwe"} and set(results["full"]["lengths"]) == {
        "1000",
        "1200",
    }
    assert results["default"]["ratio"] > results["full"]["ratio"] == 1.0

    with pytest.raises(SystemExit):
        call(monkeypatch, folder, tmp_path / "b", seed=7)
    assert "holds a run with another seed; take another --out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call(monkeypatch, folder, tmp_path / "b", lengths="3000")
    assert "the model's context is 2048" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call(monkeypatch, folder, tmp_path / "b", tasks="niah")
    assert "unknown task 'niah'; there are niah_single_1" in capsys.readouterr().err


def start(folder, out, *launcher):
    """A run in a process of its own, eight samples; with one thread, as each of several processes has."""
    command = [sys.executable, *launcher, "-m", "eval.ruler"]
    command += arguments(folder, out, samples=4, methods="full,default")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def finish(process):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-2000:]


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("reference")
    finish(start(folder, out))
    return out


def assert_same(out, reference):
    for name in ("results.json", "predictions.jsonl"):
        assert (out / name).read_text() == (reference / name).read_text()


@pytest.mark.slow
def test_two_processes_give_the_file_of_one(folder, tmp_path, reference):
    # "multi_gpu" is what accelerate calls processes on one machine; here they run on its CPU.
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    finish(start(folder, tmp_path, *launcher, "--mixed_precision", "no", "--dynamo_backend", "no"))
    parts = [(tmp_path / f"part-000{rank}.jsonl").read_text().count("\n") for rank in (0, 1)]
    assert parts == [4, 4]
    assert_same(tmp_path, reference)


@pytest.mark.slow
def test_a_killed_run_goes_on(folder, tmp_path, reference):
    process = start(folder, tmp_path)
    part = tmp_path / "part-0000.jsonl"
    while process.poll() is None and not (part.exists() and part.read_text().count("\n") >= 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "results.json").exists(), "it had finished before it could be killed"
    with part.open("a") as file:
        file.write('{"id": "fwe/9')  # as if the kill had come while a line was written
    finish(start(folder, tmp_path))
    ids = [json.loads(line)["id"] for line in part.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 8
    assert_same(tmp_path, reference)


def test_unknown_methods_and_configs(tmp_path, tiny):
    with pytest.raises(EvalError, match="unknown method 'defualt'; there are full, default"):
        make_methods(["defualt"])
    with pytest.raises(EvalError, match=r"cannot read the config .*none\.json"):
        make_methods([str(tmp_path / "none.json")])
    path = tmp_path / "mine.json"
    path.write_text('{"key_stepp": 1}')
    with pytest.raises(EvalError, match=r"mine\.json is not a MosaicKVConfig: .*key_stepp"):
        make_methods([str(path)])
    path.write_text(MosaicKVConfig(key_step=0.9).to_json())
    (tmp_path / "full.json").write_text(path.read_text())
    with pytest.raises(EvalError, match=r"full\.json would be named 'full', as another method is"):
        make_methods(["full", str(tmp_path / "full.json")])
    (sample,) = prompts(1)
    cache = make_methods([str(path)])["mine"](prefill(tiny, sample))
    assert cache.compression.key_step == 0.9
    assert set(NAMES) >= {"full", "default", "paper", "quantized", "quest", "think"}


def record(name, task, length, full, other):
    methods = {"full": {"score": full, "kl": 0.0, "bytes": 100}, "other": {"score": other, "kl": 0.5, "bytes": 20}}
    return {"id": name, "task": task, "length": length, "prompt_tokens": 10, "bytes_bf16": 100, "methods": methods}


def test_averages_weigh_tasks_alike_and_intervals_are_paired():
    records = [record(f"a{i}", "a", 1, 1.0, 0.5) for i in range(8)] + [
        record(f"b{i}", "b", 1, 0.5, 0.5) for i in (1, 2)
    ]
    results = summarize(records, ["full", "other"], {})["methods"]
    assert results["full"]["average"] == pytest.approx(75) and results["other"]["average"] == pytest.approx(50)
    # Every sample of task a loses the same, so resampling changes nothing.
    assert results["other"]["loss"]["points_interval_95"] == pytest.approx([25, 25])
    assert results["other"]["ratio"] == pytest.approx(5) and results["other"]["bytes_per_token"] == 2
    assert results["other"]["kl"] == pytest.approx(0.5)
    assert results["other"]["loss"]["percent_interval_95"] == pytest.approx([100 / 3, 100 / 3])
    assert results["other"]["ahead_of"]["full"]["points"] == pytest.approx(-25)
    # One sample says nothing of the spread.
    alone = summarize(records[:9], ["full", "other"], {})["methods"]["other"]["loss"]
    assert alone["points"] == pytest.approx(25) and alone["points_interval_95"] is None
    mixed = [record(f"a{i}", "a", 1, 1.0, i % 2) for i in range(100)]
    low, high = summarize(mixed, ["full", "other"], {})["methods"]["other"]["loss"]["points_interval_95"]
    # Half of 100 lose: the mean's standard error is 5 points.
    assert low == pytest.approx(50 - 1.96 * 5, abs=1.5) and high == pytest.approx(50 + 1.96 * 5, abs=1.5)


def test_report(tmp_path, monkeypatch):
    records = [record(f"{task}{length}", task, length, 1.0, 0.5) for task in "ab" for length in (1, 2)]
    made = {
        "benchmark": "ruler",
        "model": "m",
        "seed": 1,
        "commit": "c",
        "versions": {"torch": "2"},
        "device": "cpu",
        "machine": {"cpu": "x"},
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.json").write_text(json.dumps(summarize(records, ["full", "other"], made)))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    report.main()
    text = (tmp_path / "out/report.md").read_text()
    assert "| other | 50.00 | 50.00 | 0.5000 | 2 | 5.00 |" in text
    for plot in ("bytes", "lengths", "tasks"):
        assert f"(run-{plot}.svg)" in text and "<svg" in (tmp_path / f"out/run-{plot}.svg").read_text()


def test_lm_evaluation_harness(folder, tmp_path, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from eval.lm_harness import MosaicKVLM

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab " * (200 + i), "answer": "x"}) + "\n" for i in range(2)))
    (tmp_path / "local.yaml").write_text(
        f"""
task: local_needle
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
    )
    used = []
    original = MosaicKVCache.__init__

    def spy(self, *args, **kwargs):
        original(self, *args, **kwargs)
        used.append(self)

    monkeypatch.setattr(MosaicKVCache, "__init__", spy)
    answers = {}
    for compression in ("lossless", "default"):
        model = MosaicKVLM(pretrained=str(folder), device="cpu", compression=compression, batch_size=2)
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        result = simple_evaluate(
            model, tasks=["local_needle"], task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        answers[compression] = [sample["resps"] for sample in result["samples"]["local_needle"]]
    assert [cache.compression for cache in used] == [MosaicKVConfig.preset(name) for name in ("lossless", "default")]
    assert all(cache.stats().dense_materializations == 0 for cache in used)
    assert len(answers["lossless"]) == 2 and used[1].stats().segments > 0
