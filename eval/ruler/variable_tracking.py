"""vt: which variables got a value through a chain of assignments."""

import itertools
import random
import string

from .niah import NOISE
from .prompts import Prompt

HOPS = 4
_TEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are: "
)
# Lines of the worked example: as many as stay below RULER's 500 tokens with the tokenizers we know.
_EXAMPLE_LINES = 12


def build(rng: random.Random, size: int) -> Prompt:
    """A prompt with a worked example before it; `size` is the lines of noise."""
    example = _chain(rng, _EXAMPLE_LINES, letters=3)
    question = _chain(rng, size, letters=5)
    worked = f"{example.text}{example.answer_prefix} {' '.join(example.answers)}\n\n"
    return Prompt(worked + question.text, question.answer_prefix, question.answers)


def _chain(rng: random.Random, lines: int, letters: int) -> Prompt:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randint(10000, 99998))
    chain = [f"VAR {names[0]} = {value}"] + [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    context = [NOISE] * lines
    for i, (place, assignment) in enumerate(zip(sorted(rng.sample(range(lines), len(chain))), chain)):
        context.insert(place + i, assignment)
    text = "\n".join(context).replace(". \n", ".\n")
    fields = {"value": value, "count": HOPS + 1}
    return Prompt(_TEXT.format(context=text, **fields), _PREFIX.format(**fields), names)
