"""Runs a benchmark: shards its samples over processes, goes on where a killed run stopped, gathers each answer once."""

import hashlib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from tqdm import tqdm

from .decoding import Decoder
from .errors import EvalError
from .methods import make_methods
from .results import RESULTS, summarize
from .samples import Sample

PREDICTIONS, SETTINGS = "predictions.jsonl", "settings.json"
Record = dict[str, Any]
"""One sample's line of `PREDICTIONS`: what it was, and by method the answer, its score, KL and bytes."""


def run(
    samples: list[Sample],
    methods: list[str],
    *,
    model,
    tokenizer,
    state,
    out: Path,
    batch_size: int,
    settings: dict[str, Any],
    made: dict[str, Any],
) -> dict[str, Any] | None:
    """Answers every sample with every method, and writes predictions and results into `out`.

    Batches are cut, each of one task and length, before they are shared out, and one is the unit of what is done, so
    that neither the number of processes nor an interruption changes a batch.

    Args:
        methods: names, see `eval.methods`; "full" is always among them, for the others are compared to it.
        state: `accelerate.PartialState`.
        settings: what the results depend on; a folder with others is refused. Samples and methods may be added.
        made: machine, versions and commit, as the results say them.

    Returns:
        the results, on the main process; None on the others.

    Raises:
        EvalError: `out` holds a run with other settings or prompts; a prompt longer than the model's context.
    """
    methods = list(dict.fromkeys(["full", *methods]))
    makers = make_methods(methods)
    names = list(makers)
    check_context(model, samples)
    out.mkdir(parents=True, exist_ok=True)
    known = _resume(out, settings, state)
    for sample in samples:
        if known.get(sample.id, {"prompt": _digest(sample)})["prompt"] != _digest(sample):
            raise EvalError(f"{out} holds an answer to another prompt as {sample.id}; take another --out, or remove it")

    cells: dict[tuple, list[Sample]] = {}
    for sample in samples:
        cells.setdefault((sample.length, sample.task), []).append(sample)
    batches = [cell[i : i + batch_size] for cell in cells.values() for i in range(0, len(cell), batch_size)]
    wanting = [
        (batch, missing)
        for batch in batches
        if (missing := [n for n in names if any(n not in known.get(s.id, {}).get("methods", {}) for s in batch)])
    ]
    mine = wanting[state.process_index :: state.num_processes]
    decoder = Decoder(model, tokenizer.pad_token_id or 0)
    records: list[Record] = []
    # A part file of its own for every process: a killed one leaves whole lines, but for the last.
    with (out / f"part-{state.process_index:04d}.jsonl").open("a", encoding="utf-8") as part:
        progress = tqdm(mine, unit="batch", disable=not state.is_main_process)
        for batch, missing in progress:
            # "full" is decoded again if need be: it is what the others are compared to.
            asked = {name: makers[name] for name in dict.fromkeys(["full", *missing])}
            answers = decoder.answer(batch, asked)
            new = [
                _record(sample, {name: answers[name][i] for name in asked}, tokenizer) for i, sample in enumerate(batch)
            ]
            part.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in new))
            part.flush()
            os.fsync(part.fileno())
            records += new
            progress.set_postfix_str(_running(records, names))
    for record in gather_object(records):
        _merge(known, record)
    if not state.is_main_process:
        return None
    done = [known[sample.id] for sample in samples]
    results = summarize(done, names, settings | made)
    lines = [{"settings": settings | made}, *done]
    _write(out / PREDICTIONS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    _write(out / RESULTS, json.dumps(results, indent=2) + "\n")
    return results


def check_context(model, samples: list[Sample]) -> None:
    """Raises `EvalError` if a prompt and its answer do not fit into the model's context."""
    context = getattr(model.config, "max_position_embeddings", None)
    for sample in samples:
        needed = len(sample.input_ids) + sample.max_new_tokens
        if context is not None and needed > context:
            raise EvalError(
                f"sample {sample.id} needs {needed} tokens, but the model's context is {context}; "
                "ask for shorter prompts (--lengths, --max-length) or take another model"
            )


def _record(sample: Sample, answers: dict, tokenizer) -> Record:
    module, config = sample.metric
    score: Callable = importlib.import_module(f"eval.metrics.{module}").score
    methods = {}
    for name, answer in answers.items():
        prediction = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        methods[name] = {
            "prediction": prediction,
            "score": score(config, prediction, sample.answers, **sample.references),
            "kl": 0.0 if name == "full" else answer.kl,
            "bytes": answer.bytes,
        }
    return {
        "id": sample.id,
        "task": sample.task,
        "length": sample.length,
        "prompt": _digest(sample),
        "prompt_tokens": len(sample.input_ids),
        "bytes_bf16": answer.bytes_bf16,
        "answers": sample.answers,
        "methods": methods,
    }


def _digest(sample: Sample) -> str:
    return hashlib.sha256(json.dumps([sample.input_ids, sample.max_new_tokens]).encode()).hexdigest()[:16]


def _resume(out: Path, settings: dict[str, Any], state) -> dict[str, Record]:
    """Records by id of an earlier run with the same settings, from every machine's files."""
    found: list[Record] = []
    problem = None
    if state.is_local_main_process:
        saved = out / SETTINGS
        settings = json.loads(json.dumps(settings))
        old = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else settings
        configs = {**settings["configs"], **old["configs"]}
        changed = sorted(name for name in settings if name != "configs" and old.get(name) != settings[name])
        changed += [f"config of {name}" for name, given in settings["configs"].items() if configs[name] != given]
        if changed:
            problem = f"{out} holds a run with another {', '.join(changed)}; take another --out, or remove it"
        elif state.is_main_process:
            _write(saved, json.dumps({**settings, "configs": configs}, indent=2) + "\n")
        try:
            for path in sorted([*out.glob("part-*.jsonl"), *out.glob(PREDICTIONS)]):
                found += _whole_lines(path)
        except EvalError as error:
            problem = str(error)
    problem = next((p for p in gather_object([problem]) if p), None)  # all processes end together
    if problem:
        raise EvalError(problem)
    known: dict[str, Record] = {}
    for record in gather_object(found):
        _merge(known, record)
    return known


def _whole_lines(path: Path) -> list[Record]:
    """The records of a file, without a last line that a killed run broke off, which is removed."""
    content = path.read_bytes()
    good = content.rfind(b"\n") + 1
    if good < len(content):
        with path.open("r+b") as file:
            file.truncate(good)
    records = []
    for number, line in enumerate(content[:good].splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise EvalError(
                f"{path}, line {number}: not JSON; remove the line, its sample is then done again"
            ) from None
        if "settings" not in record:
            records.append(record)
    return records


def _merge(known: dict[str, Record], record: Record) -> None:
    old = known.get(record["id"])
    known[record["id"]] = record if old is None else {**old, "methods": {**record["methods"], **old["methods"]}}


def _running(records: list[Record], names: list[str]) -> str:
    means = []
    for name in names:
        scores = [record["methods"][name]["score"] for record in records if name in record["methods"]]
        if scores:
            means.append(f"{name} {100 * sum(scores) / len(scores):.1f}")
    return ", ".join(means)


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
