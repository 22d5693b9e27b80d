"""LongBench's rows as samples: prompts, truncation in the middle, chat template."""

import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import EvalError
from ..rows import read_rows
from ..samples import Sample, chat_ids
from .tasks import ENDS_WITH_LINE, NOT_CHATS, TASKS, length_range

FIELDS = {"input": str, "context": str, "answers": list, "length": int}


def make_samples(
    tokenizer, source: str, names: list[str], max_length: int, limit: int | None, by_length: bool, chat: bool
) -> Iterator[Sample]:
    """Samples of every task in order.

    Args:
        source: a folder with `TASK.jsonl` or `TASK.parquet` files, or a Hub id with a config for each task
            (`Xnhyacinth/LongBench`; `THUDM/LongBench` is a script, which newer `datasets` refuse).
        max_length: tokens of a prompt; the middle of a longer one is left out, as LongBench does.
        limit: rows of each task; None for all.
        by_length: group scores by LongBench-E's ranges; its rows are taken (`TASK_e`) where there are some.

    Raises:
        EvalError: no data for a task, or a malformed row.
    """
    for name in names:
        rows = read_rows(*_source(source, name, by_length))
        for number, (where, row) in enumerate(rows):
            if number == limit:
                break
            _check(where, name, row)
            yield _sample(tokenizer, name, number, row, max_length, by_length, chat)


def _check(where: str, name: str, row: dict) -> None:
    """Raises `EvalError` if the task's metric could make nothing of a row."""
    if not row["answers"]:
        raise EvalError(f"{where}: field 'answers' is empty")
    if name == "trec" and not row.get("all_classes"):
        raise EvalError(f"{where}: field 'all_classes' is empty, which trec's metric needs")
    if name == "passage_retrieval_en" and not all(re.search(r"Paragraph \d+", str(a)) for a in row["answers"]):
        raise EvalError(f"{where}: field 'answers' must be like 'Paragraph 7', got {row['answers']!r:.60}")


def _sample(tokenizer, name: str, number: int, row: dict, max_length: int, by_length: bool, chat: bool) -> Sample:
    task = TASKS[name]
    prompt = task.prompt.format(context=row["context"], input=row["input"])
    ids = tokenizer(prompt).input_ids
    if len(ids) > max_length:
        half = max_length // 2
        prompt = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    return Sample(
        id=f"{name}/{number}",
        task=name,
        length=length_range(row["length"]) if by_length else "all",
        input_ids=chat_ids(tokenizer, prompt, chat=chat and name not in NOT_CHATS),
        answers=[str(answer) for answer in row["answers"]],
        max_new_tokens=task.max_new_tokens,
        metric=("longbench", name),
        stop_ids=(tokenizer.encode("\n", add_special_tokens=False)[-1],) if name in ENDS_WITH_LINE else (),
        references={"classes": row.get("all_classes") or []},
    )


def _source(source: str, name: str, by_length: bool) -> tuple[str, dict[str, type], str | None]:
    folder = Path(source)
    wanted = [f"{name}_e", name] if by_length else [name]
    if not folder.is_dir():
        if folder.exists() or source.startswith((".", "/")):
            raise EvalError(f"no folder {source}; --data takes a folder with {name}.jsonl, or a Hub id")
        return source, FIELDS, wanted[0]
    for stem in wanted:
        for suffix in (".jsonl", ".parquet"):
            if (folder / (stem + suffix)).is_file():
                return str(folder / (stem + suffix)), FIELDS, None
    raise EvalError(f"{source} has no {name}.jsonl or {name}.parquet; add it, or leave {name} out of --tasks")
