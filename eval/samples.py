"""What a benchmark hands to the runner."""

from dataclasses import dataclass, field
from typing import Any

from .errors import EvalError


@dataclass(frozen=True)
class Sample:
    """One question, ready for the model.

    Attributes:
        id: unique within a run.
        task: of the benchmark.
        length: what scores are grouped by beside the task: the nominal length in tokens, or a name for a range.
        input_ids: the whole prompt, what starts the answer included.
        answers: references.
        max_new_tokens: the longest answer.
        metric: module of `eval.metrics` and its config name, which score an answer.
        stop_ids: tokens that end an answer beside the model's own; with some, an answer has at least one token.
        references: what else the metric wants to know.
    """

    id: str
    task: str
    length: int | str
    input_ids: list[int]
    answers: list[str]
    max_new_tokens: int
    metric: tuple[str, str]
    stop_ids: tuple[int, ...] = ()
    references: dict[str, Any] = field(default_factory=dict)


def chat_ids(tokenizer, text: str, answer_prefix: str = "", chat: bool = True) -> list[int]:
    """Token ids of a prompt: `text` as a chat's user turn if asked and the tokenizer knows chats, then the prefix."""
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        # Templates of thinking models would open a thought, which answers of a few tokens have no room for.
        prompt = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return tokenizer(prompt + answer_prefix, add_special_tokens=False).input_ids
    return tokenizer(text + answer_prefix).input_ids


def known(what: str, names: list[str], allowed: list[str]) -> list[str]:
    """`names`, all of which must be allowed; "all" stands for every one.

    Raises:
        EvalError: one is not.
    """
    if names == ["all"]:
        return list(allowed)
    for name in names:
        if name not in allowed:
            raise EvalError(f"unknown {what} {name!r}; there are {', '.join(allowed)}")
    return names
