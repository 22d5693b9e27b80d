"""cwe and fwe: the words that appear most often."""

import math
import random
import string

from .prompts import Prompt
from .sources import words

_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
NUM_COMMON = 10
_CODED_LETTERS = 6


def build_common(rng: random.Random, size: int, max_length: int) -> Prompt:
    """cwe: a numbered list of `size` different words, ten of them frequent, after a worked example."""
    short = max_length < 4096
    example, named = _numbered(rng, *((20, 3, 1) if short else (40, 10, 3)))
    context, common = _numbered(rng, size, *((6, 1) if short else (30, 3)))
    text, prefix = _COMMON
    worked = text.format(context=example) + prefix + " " + " ".join(f"{i}. {word}" for i, word in enumerate(named, 1))
    return Prompt(worked + "\n" + text.format(context=context), prefix, common)


def _numbered(rng: random.Random, size: int, common_repeats: int, other_repeats: int) -> tuple[str, list[str]]:
    chosen = rng.sample(words("all"), size)
    common = chosen[:NUM_COMMON]
    listed = common * common_repeats + chosen[NUM_COMMON:] * other_repeats
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), common


def build_frequent(rng: random.Random, size: int, max_length: int, max_new_tokens: int) -> Prompt:
    """fwe: about `size` coded words, their frequencies by a zeta distribution of exponent 2, the first one dots."""
    vocabulary: list[str] = []
    count = (max_length - max_new_tokens) // 50
    seen = {"..."}
    while len(vocabulary) < count:
        word = "".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))
        if word not in seen:
            seen.add(word)
            vocabulary.append(word)
    vocabulary[0] = "..."
    zeta2 = math.pi**2 / 6
    listed = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(size / rank**2 / zeta2))]
    rng.shuffle(listed)
    text, prefix = _FREQUENT
    return Prompt(text.format(context=" ".join(listed)), prefix, vocabulary[1:4])
