"""Rows of a data set, from a file or the Hub, each checked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import EvalError

_KINDS = {str: "text", int: "a number", list: "a list"}


def read_rows(source: str, fields: dict[str, type], config: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with these fields, each after where it is from (file and line, for messages).

    Args:
        source: a jsonl or parquet file, or the Hub id of a dataset, of which the split "test" is taken.
        fields: name and type.
        config: of a Hub dataset.

    Raises:
        EvalError: no such source, or a row that is malformed.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".json") and path.is_file():
        rows = _jsonl(path)
    elif path.suffix == ".parquet" and path.is_file():
        import datasets

        table = datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
        rows = ((f"{path}, row {i}", row) for i, row in enumerate(table, 1))
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source) and path.suffix not in (".jsonl", ".json", ".parquet"):
        rows = _hub(source, config)
    else:
        raise EvalError(f"no data at {source}; give an existing .jsonl or .parquet file, or a Hub id owner/name")
    for where, row in rows:
        if not isinstance(row, dict):
            raise EvalError(f"{where}: a row must be an object, got {type(row).__name__}")
        for name, kind in fields.items():
            if name not in row:
                raise EvalError(f"{where}: no field {name!r}; a row has {', '.join(fields)}")
            if not isinstance(row[name], kind):
                raise EvalError(f"{where}: field {name!r} must be {_KINDS[kind]}, got {row[name]!r:.40}")
        yield where, row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    yield where, json.loads(line)
                except json.JSONDecodeError as error:
                    raise EvalError(f"{where}: not JSON ({error.msg}); mend or remove the line") from None


def _hub(source: str, config: str | None) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        table = datasets.load_dataset(source, config, split="test")
    except Exception as error:  # datasets and the Hub raise many kinds
        raise EvalError(f"no file {source}, and it cannot be loaded from the Hub: {error}") from error
    return ((f"{source}, row {i}", row) for i, row in enumerate(table))
