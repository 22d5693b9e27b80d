"""LongBench's metrics for its English tasks, as a module for `evaluate`."""

import re
import string
from collections import Counter

import datasets
import evaluate
from rapidfuzz import fuzz
from rouge import Rouge


def qa_f1(prediction: str, reference: str, classes: list[str]) -> float:
    """F1 of words in common, after SQuAD's normalization."""
    ours, theirs = _normalized(prediction), _normalized(reference)
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else 0.0


def rouge_l(prediction: str, reference: str, classes: list[str]) -> float:
    """F-score of ROUGE-L, of the package `rouge`; 0 where it cannot be taken (an empty prediction)."""
    try:
        return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, reference: str, classes: list[str]) -> float:
    """One over the number of classes that the prediction names, if the right one is among them."""
    named = [name for name in classes if name in prediction]
    # A class that is part of the right one's name does not count. LongBench removes while it walks the list, so the
    # class behind a removed one stays; the same here, so that scores are the same.
    i = 0
    while i < len(named):
        if named[i] in reference and named[i] != reference:
            del named[i]
        i += 1
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: list[str]) -> float:
    """Share of the numbers in the prediction that are the reference's paragraph ("Paragraph 7")."""
    return count(prediction, re.findall(r"Paragraph (\d+)", reference)[0], classes)


def count(prediction: str, reference: str, classes: list[str]) -> float:
    """Share of the numbers in the prediction that are the reference."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, classes: list[str]) -> float:
    """Edit similarity of the prediction's first line of code with the reference, in whole percent."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, reference)) / 100


METRICS = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    "trec": classification,
    "passage_retrieval_en": retrieval,
    "passage_count": count,
    **dict.fromkeys(("lcc", "repobench-p"), code_similarity),
}
_FIRST_LINE = ("trec", "triviaqa", "samsum")
"""Few-shot tasks, where models go on with another example: only the first line counts."""


def score(config: str, prediction: str, references: list[str], classes: list[str] | None = None) -> float:
    """The best score of one prediction against any of the references, in [0, 1]; `config` is the task's name."""
    if config in _FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max(METRICS[config](prediction, reference, classes or []) for reference in references)


def _normalized(text: str) -> list[str]:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


class LongBenchMetric(evaluate.Metric):
    """Mean over predictions of `score`, in percent."""

    def _info(self):
        if self.config_name not in METRICS:
            raise ValueError(f"`config_name` must be one of {', '.join(map(repr, METRICS))}, got {self.config_name!r}")
        return evaluate.MetricInfo(
            description=METRICS[self.config_name].__doc__,
            citation="arXiv:2308.14508",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions, references, classes=None):
        scores = [score(self.config_name, p, r, classes) for p, r in zip(predictions, references)]
        return {"score": 100 * sum(scores) / len(scores)}
