"""The 13 tasks: settings of RULER's `synthetic.yaml`, and samples of them."""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import EvalError
from ..samples import Sample, chat_ids
from . import niah, qa, variable_tracking, word_extraction
from .fitting import largest
from .prompts import Prompt, Task
from .sources import haystack_words, hotpotqa, squad, words

NAMES = [
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
]
_NIAH = {
    "niah_single_1": dict(haystack="noise"),
    "niah_single_2": dict(haystack="essay"),
    "niah_single_3": dict(haystack="essay", values="uuids"),
    "niah_multikey_1": dict(haystack="essay", num_keys=4),
    "niah_multikey_2": dict(haystack="needle"),
    "niah_multikey_3": dict(haystack="needle", keys="uuids", values="uuids"),
    "niah_multivalue": dict(haystack="essay", num_values=4),
    "niah_multiquery": dict(haystack="essay", num_queries=4),
}
_UNIT_TOKENS = {"essay": 1.3, "noise": 25, "needle": 40}
_QA_SOURCES = {"qa_1": ("squad", squad), "qa_2": ("hotpotqa", hotpotqa)}


@dataclass(frozen=True)
class Sources:
    """Where haystack and questions come from; see `sources`. None: built in, or none."""

    haystack: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None


def make_task(name: str, sources: Sources, number: int = 0) -> Task:
    """The task `name`; `number` tells which question of a question set."""
    if name in _NIAH:
        settings = _NIAH[name]
        essay = _load(haystack_words, sources.haystack) if settings["haystack"] == "essay" else []
        return Task(
            lambda rng, size, length: niah.build(rng, size, essay=essay, **settings),
            smallest=5,
            unit_tokens=_UNIT_TOKENS[settings["haystack"]],
            max_new_tokens=128,
        )
    if name == "vt":
        return Task(lambda rng, size, length: variable_tracking.build(rng, size), variable_tracking.HOPS + 1, 25, 30)
    if name == "cwe":
        return Task(word_extraction.build_common, word_extraction.NUM_COMMON, 20, 120, largest=len(words()))
    if name == "fwe":
        return Task(
            lambda rng, size, length: word_extraction.build_frequent(rng, size, length, 50),
            smallest=50,
            unit_tokens=4,
            max_new_tokens=50,
        )
    field, load = _QA_SOURCES[name]
    source = _load(load, getattr(sources, field))
    return Task(
        lambda rng, size, length: qa.build(rng, size, source=source, number=number),
        smallest=1,
        unit_tokens=150,
        max_new_tokens=32,
        match="part",
    )


def make_prompt(name: str, length: int, seed: int, sources: Sources, count_tokens) -> tuple[Prompt, Task]:
    """The sample of a task that fills `length` tokens best, answer included; all random follows from the seed.

    Args:
        count_tokens: of a `Prompt`, how many tokens it has.

    Raises:
        EvalError: not even the smallest one fits.
    """
    task = make_task(name, sources, seed)

    def build(size: int) -> Prompt:
        return task.build(random.Random(f"{name}/{length}/{seed}"), size, length)

    def fits(size: int) -> bool:
        if task.largest is not None and size > task.largest:
            return False
        return count_tokens(build(size)) + task.max_new_tokens <= length

    size = largest(fits, task.smallest, int(length / task.unit_tokens))
    if size is None:
        raise EvalError(f"task {name} does not fit into {length} tokens; leave it out of --tasks, or add to --lengths")
    if size == task.largest:
        raise EvalError(f"task {name} has too few words for {length} tokens; leave it out of --tasks")
    return build(size), task


def make_samples(
    tokenizer, names: list[str], lengths: list[int], count: int, seed: int, sources: Sources, chat: bool
) -> Iterator[Sample]:
    """`count` samples of every task and length, with seeds from `seed` on."""

    def ids(prompt: Prompt) -> list[int]:
        return chat_ids(tokenizer, prompt.text, prompt.answer_prefix, chat)

    for length in lengths:
        for name in names:
            for i in range(seed, seed + count):
                prompt, task = make_prompt(name, length, i, sources, lambda prompt: len(ids(prompt)))
                yield Sample(
                    id=f"{name}/{length}/{i}",
                    task=name,
                    length=length,
                    input_ids=ids(prompt),
                    answers=prompt.answers,
                    max_new_tokens=task.max_new_tokens,
                    metric=("ruler", task.match),
                )


@functools.cache
def _load(load, source: str | None):
    return load(source)
