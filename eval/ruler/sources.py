"""What RULER's tasks are made of: haystack text, words, questions with documents."""

import contextlib
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import EvalError


@dataclass(frozen=True)
class Question:
    """A question with the numbers of its documents.

    Attributes:
        query: the question.
        answers: references.
        documents: those that belong to it, the ones with the answer first.
        related: further ones on the same subject.
    """

    query: str
    answers: list[str]
    documents: list[int]
    related: list[int]


@dataclass(frozen=True)
class QuestionSet:
    """Questions over numbered documents."""

    questions: list[Question]
    documents: list[str]


def haystack_words(source: str | None) -> list[str]:
    """Words of the essay haystack.

    Args:
        source: a text file, RULER's `PaulGrahamEssays.json` (an object with the field "text"), the Hub id of a dataset
            with a column "text", or None for a text of our own, which is short and repeats.
    """
    if source is None:
        text = (Path(__file__).parent / "haystack.txt").read_text(encoding="utf-8")
    elif Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8")
        if source.endswith(".json"):
            text = _field(source, _json(source), "text")
    else:
        text = " ".join(row["text"] for row in _from_hub(source, "haystack", "text"))
    words = text.split()
    if not words:
        raise EvalError(f"the haystack {source} is empty")
    return words


def squad(source: str | None) -> QuestionSet:
    """SQuAD's questions: its own JSON format, or a Hub dataset with its columns (context, question, answers, title)."""
    source = _given(source, "qa_1", "--squad", "SQuAD 2.0 dev JSON", "rajpurkar/squad_v2")
    if Path(source).is_file():
        content = _field(source, _json(source), "data")
        with _format_of("SQuAD", source):
            articles = [[(p["context"], p["qas"]) for p in article["paragraphs"]] for article in content]
    else:
        by_title: dict[str, dict[str, list]] = {}
        for row in _from_hub(source, "SQuAD", "context"):
            qa = {"question": row["question"], "answers": [{"text": text} for text in row["answers"]["text"]]}
            qa["is_impossible"] = not qa["answers"]
            by_title.setdefault(row.get("title", ""), {}).setdefault(row["context"], []).append(qa)
        articles = [list(paragraphs.items()) for paragraphs in by_title.values()]
    documents = sorted({context for article in articles for context, _ in article})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    with _format_of("SQuAD", source):
        for article in articles:
            others = [number[context] for context, _ in article]
            for context, qas in article:
                for qa in qas:
                    if not qa.get("is_impossible", False):
                        own = number[context]
                        answers = list(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                        related = [i for i in dict.fromkeys(others) if i != own]
                        questions.append(Question(qa["question"], answers, [own], related))
    return _some(QuestionSet(questions, documents), source)


def hotpotqa(source: str | None) -> QuestionSet:
    """HotpotQA's questions (distractor setting): its own JSON format, or a Hub dataset with its columns."""
    source = _given(source, "qa_2", "--hotpotqa", "HotpotQA dev distractor JSON", "hotpotqa/hotpot_qa")
    if Path(source).is_file():
        rows = _json(source)
    else:
        rows = [
            {
                **row,
                "context": list(zip(row["context"]["title"], row["context"]["sentences"])),
                "supporting_facts": [(title, 0) for title in row["supporting_facts"]["title"]],
            }
            for row in _from_hub(source, "HotpotQA", "context", config="distractor")
        ]
    with _format_of("HotpotQA", source):
        return _hotpotqa(rows, source)


def _hotpotqa(rows: list[dict], source: str) -> QuestionSet:
    named = [[(title, f"{title}\n{''.join(sentences)}") for title, sentences in row["context"]] for row in rows]
    documents = sorted({document for row in named for _, document in row})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for row, own in zip(rows, named):
        supporting = {fact[0] for fact in row["supporting_facts"]}
        own = sorted(own, key=lambda pair: pair[0] not in supporting)  # stable: otherwise as given
        questions.append(Question(row["question"], [row["answer"]], [number[d] for _, d in own], []))
    return _some(QuestionSet(questions, documents), source)


@functools.cache
def words(kind: str = "all") -> tuple[str, ...]:
    """English words of wonderwords, sorted: `"noun"`, `"adjective"`, `"verb"` or `"all"`."""
    from wonderwords import Defaults, RandomWord

    parts = RandomWord(noun=Defaults.NOUNS, adjective=Defaults.ADJECTIVES, verb=Defaults.VERBS)
    kinds = ["noun", "adjective", "verb"] if kind == "all" else [kind]
    return tuple(sorted(set(parts.filter(include_categories=kinds))))


@functools.cache
def _sentence_splitter():
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    return PunktSentenceTokenizer()  # its defaults need no data to download


def sentences(text: str) -> list[str]:
    """The sentences of a text."""
    return _sentence_splitter().tokenize(text)


def _given(source: str | None, task: str, option: str, what: str, hub_id: str) -> str:
    if source is None:
        raise EvalError(
            f"task {task} needs {option}: the {what} file, or a Hub id such as {hub_id}; or leave {task} out of --tasks"
        )
    return source


def _some(questions: QuestionSet, source: str) -> QuestionSet:
    if not questions.questions:
        raise EvalError(f"{source} has no question with an answer")
    return questions


@contextlib.contextmanager
def _format_of(what: str, source: str):
    """A field that is missing is the file's fault."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EvalError(f"{source} does not have {what}'s fields ({error!r}); is it the right file?") from error


def _json(path: str):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise EvalError(f"{path}, line {error.lineno}: not JSON ({error.msg}); download the file again") from None


def _field(path: str, content, name: str):
    if not isinstance(content, dict) or name not in content:
        raise EvalError(f"{path} has no field {name!r}; is it the right file?")
    return content[name]


def _from_hub(source: str, what: str, column: str, config: str | None = None):
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or Path(source).suffix in (".json", ".txt"):
        raise EvalError(f"{what}: no file {source}; give the path of an existing one, or a Hub id owner/name")
    import datasets

    try:
        parts = datasets.load_dataset(source, config)
    except Exception as error:  # datasets and the Hub raise many kinds
        raise EvalError(f"{what}: no file {source}, and it cannot be loaded from the Hub: {error}") from error
    part = parts.get("validation") or next(iter(parts.values()))
    if column not in part.column_names:
        raise EvalError(f"{what}: {source} has no column {column!r}, only {', '.join(part.column_names)}")
    return part
