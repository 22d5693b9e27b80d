"""Needles in a haystack: the eight niah tasks."""

import random
import uuid

from .prompts import Prompt
from .sources import sentences, words

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(i * 100 / 39) for i in range(40)]
"""Where a needle may lie in an essay, in percent of its sentences."""

_MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)


def build(
    rng: random.Random,
    size: int,
    *,
    haystack: str,
    essay: list[str],
    keys: str = "words",
    values: str = "numbers",
    num_keys: int = 1,
    num_values: int = 1,
    num_queries: int = 1,
) -> Prompt:
    """A prompt with needles.

    Args:
        size: words of the essay, or sentences of another haystack.
        haystack: `"noise"`, `"essay"` or `"needle"` (needles that are not asked for).
        essay: its words; repeated where it is too short.
        keys, values: `"words"`, `"numbers"` or `"uuids"`.
        num_keys, num_values, num_queries: keys hidden, values for each, keys asked for.
    """
    names = [_random(rng, keys) for _ in range(max(num_keys, num_queries))]
    hidden = {name: [_random(rng, values) for _ in range(num_values)] for name in names}
    needles = [NEEDLE.format(kind=values, key=k, value=v) for k, of_key in hidden.items() for v in of_key]
    rng.shuffle(needles)
    asked = rng.sample(names, num_queries)
    if haystack == "essay":
        context = _in_essay(rng, essay, size, needles)
    else:
        context = _in_lines(rng, haystack, size, needles, keys, values)

    query = asked[0] if num_queries == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
    single = num_queries * num_values == 1
    text, prefix = _ONE if single else _MANY
    fields = {"kind": values.removesuffix("s") if single else values, "query": query}
    return Prompt(
        text.format(context=context, **fields),
        prefix.format(**fields),
        [value for key in asked for value in hidden[key]],
    )


def _in_essay(rng: random.Random, essay: list[str], size: int, needles: list[str]) -> str:
    repeated = essay * -(-size // len(essay))
    parts = sentences(" ".join(repeated[:size]))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    pieces, last = [], 0
    for depth, needle in zip(depths, needles):
        place = int(len(parts) * (depth / 100))
        pieces += [" ".join(parts[last:place]), needle]
        last = place
    return " ".join([*pieces, " ".join(parts[last:])])


def _in_lines(rng: random.Random, haystack: str, size: int, needles: list[str], keys: str, values: str) -> str:
    if haystack == "noise":
        lines = [NOISE] * size
    else:
        lines = [NEEDLE.format(kind=values, key=_random(rng, keys), value=_random(rng, values)) for _ in range(size)]
    places = sorted(rng.sample(range(size), len(needles)), reverse=True)
    for place, needle in zip(places, needles):
        lines.insert(place, needle)
    return "\n".join(lines)


def _random(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
