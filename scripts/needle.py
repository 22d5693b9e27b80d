"""Needle-in-a-haystack prompts from a seed: what `quickstart.py` and `check_accuracy.py` ask the model.

A haystack of everyday sentences, built from word lists so that it needs no data file, hides one "special magic
number" for each of several keys; the question asks for one of them. The task is RULER's `niah_multikey` in form.
"""

import random
from dataclasses import dataclass

_PEOPLE = (
    "the baker", "an old sailor", "the teacher", "my neighbour", "a young painter", "the mayor", "the librarian",
    "a quiet gardener", "the engineer", "her cousin", "the postman", "a travelling musician", "the doctor",
    "their uncle", "the shopkeeper", "a retired judge",
)  # fmt: skip
_ACTS = (
    "walked along the river", "wrote a long letter", "repaired the wooden fence", "counted the boats in the harbour",
    "listened to the evening news", "planted two rows of beans", "argued about the price of bread",
    "read a chapter aloud", "waited for the last train", "painted the kitchen door", "searched for a lost umbrella",
    "cooked a pot of soup", "looked at the stars", "told a story about the war", "sorted the coins by year",
    "closed the shop early",
)  # fmt: skip
_TIMES = (
    "before sunrise", "on a rainy Tuesday", "after the market had closed", "in the middle of winter",
    "while the children slept", "during the long holiday", "as the fog lifted", "late in the afternoon",
    "when nobody was watching", "on the first day of spring", "just before dinner", "in the year of the flood",
)  # fmt: skip
_REASONS = (
    "because the weather was mild", "although the road was muddy", "and nobody thought it strange",
    "so the dog followed behind", "but the work was never finished", "and the bells rang twice",
    "since there was nothing else to do", "while a kettle sang on the stove", "though it cost a whole week's wages",
    "and the neighbours talked about it for days", "until the lamp ran out of oil", "as people there have always done",
)  # fmt: skip
_KEYS = (
    "amber", "breeze", "cactus", "dolphin", "ember", "falcon", "glacier", "harvest", "island", "juniper", "kettle",
    "lantern", "meadow", "nectar", "orchid", "pebble", "quartz", "raven", "saddle", "thistle", "velvet", "walnut",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """A prompt (chat messages' user text) and the number that answers it."""

    text: str
    answer: str


def _sentence(rng: random.Random) -> str:
    who, act, when, why = (rng.choice(words) for words in (_PEOPLE, _ACTS, _TIMES, _REASONS))
    return f"{when.capitalize()}, {who} {act} {why}."


def make_needle(tokenizer, num_tokens: int, num_keys: int, seed: int) -> Needle:
    """Builds a prompt of about, and never more than, `num_tokens` tokens with `num_keys` hidden numbers.

    Args:
        tokenizer: a Transformers tokenizer with a chat template.
        num_tokens (`int`): length of the whole prompt in tokens, chat template included.
        num_keys (`int`): how many keys get a number; the first is asked for.
        seed (`int`): everything random follows from it.
    """
    rng = random.Random(seed)
    keys = rng.sample(_KEYS, num_keys)
    numbers = [str(rng.randint(1_000_000, 9_999_999)) for _ in keys]
    needles = [f"One of the special magic numbers for {key} is: {number}." for key, number in zip(keys, numbers)]
    depths = [rng.random() for _ in keys]
    sentences = [_sentence(rng) for _ in range(num_tokens // 12)]

    def build(count: int) -> str:
        body = sentences[:count]
        for depth, needle in sorted(zip(depths, needles), reverse=True):
            body.insert(int(depth * count), needle)
        return (
            "Some special magic numbers are hidden within the following text. Memorize them. "
            "I will quiz you about the numbers afterwards.\n" + " ".join(body) + "\n"
            f"What is the special magic number for {keys[0]} mentioned in the provided text?"
        )

    low, high = 0, len(sentences)
    while low < high:
        middle = (low + high + 1) // 2
        if prompt_ids(tokenizer, build(middle)).shape[1] <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return Needle(build(low), numbers[0])


def prompt_ids(tokenizer, text: str):
    """Token ids `[1, length]` (int64) of `text` as a chat's user turn, ready for the model's answer to start."""
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer_start = "The special magic number is"
    return tokenizer(chat + answer_start, return_tensors="pt", add_special_tokens=False).input_ids
