"""What every task yields, whatever it is about."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """A question in words.

    Attributes:
        text: what is asked, context included.
        answer_prefix: what the answer begins with.
        answers: references.
    """

    text: str
    answer_prefix: str
    answers: list[str]


@dataclass(frozen=True)
class Task:
    """How a task is made and scored.

    Attributes:
        build: of a random generator, the size of the context in units of the task (words, sentences, documents), and
            the longest length in tokens: the prompt.
        smallest: the fewest units.
        unit_tokens: about how many tokens a unit has.
        max_new_tokens: the longest answer.
        largest: the most units there are; None if there is no end.
        match: `"all"` scores the share of the references found, `"part"` whether any is.
    """

    build: Callable[[random.Random, int, int], Prompt]
    smallest: int
    unit_tokens: float
    max_new_tokens: int
    match: str = "all"
    largest: int | None = None
