"""Ready-made RULER rows, such as the Hub's `simonjegou/ruler`."""

from collections.abc import Iterator

from ..errors import EvalError
from ..rows import read_rows
from ..samples import Sample, chat_ids
from .tasks import NAMES

FIELDS = {"context": str, "question": str, "answer_prefix": str, "answer": list, "task": str, "max_new_tokens": int}


def row_samples(
    tokenizer, source: str, config: str | None, names: list[str], limit: int, chat: bool
) -> Iterator[Sample]:
    """At most `limit` samples of each task, in order; see `eval.rows.read_rows` for the source.

    Args:
        config: of a Hub dataset (`simonjegou/ruler` has one a length); also what scores are grouped by.
    """
    taken = dict.fromkeys(names, 0)
    for where, row in read_rows(source, FIELDS, config):
        task = row["task"]
        if task not in NAMES:
            raise EvalError(f"{where}: unknown task {task!r}; there are {', '.join(NAMES)}")
        if not row["answer"] or not all(isinstance(answer, str) for answer in row["answer"]):
            raise EvalError(f"{where}: field 'answer' must be a list of texts, got {row['answer']!r:.40}")
        if task not in taken or taken[task] == limit:
            continue
        number = taken[task]
        taken[task] += 1
        yield Sample(
            id=f"{task}/{config or 'rows'}/{number}",
            task=task,
            length=int(config) if config and config.isdigit() else "all",
            input_ids=chat_ids(tokenizer, row["context"] + row["question"], row["answer_prefix"], chat),
            answers=list(row["answer"]),
            max_new_tokens=row["max_new_tokens"],
            metric=("ruler", "part" if task.startswith("qa_") else "all"),
        )
