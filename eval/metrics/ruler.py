"""RULER's string match, as a module for `evaluate`."""

import datasets
import evaluate

CONFIGS = {
    "all": "share of the references that appear in the prediction, case ignored",
    "part": "whether any of the references appears in the prediction, case ignored",
}


def score(config: str, prediction: str, references: list[str]) -> float:
    """Score of one prediction, in [0, 1]; `config` is `"all"` or `"part"` (RULER's string_match_all and _part)."""
    found = [reference.lower() in prediction.lower() for reference in references]
    return sum(found) / len(found) if config == "all" else float(any(found))


class RulerStringMatch(evaluate.Metric):
    """Mean over predictions of `score`, in percent."""

    def _info(self):
        if self.config_name not in CONFIGS:
            raise ValueError(f"`config_name` must be one of {', '.join(map(repr, CONFIGS))}, got {self.config_name!r}")
        return evaluate.MetricInfo(
            description=CONFIGS[self.config_name],
            citation="arXiv:2404.06654",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions, references):
        scores = [score(self.config_name, p, r) for p, r in zip(predictions, references)]
        return {"score": 100 * sum(scores) / len(scores)}
