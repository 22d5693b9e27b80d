"""qa_1 and qa_2: a question of a reading comprehension set, its documents among others."""

import random

from .prompts import Prompt
from .sources import QuestionSet

_TEXT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    "\n\nThe following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    "\n\nQuestion: {query}"
)


def build(rng: random.Random, size: int, *, source: QuestionSet, number: int) -> Prompt:
    """Question `number` (modulo how many there are) over `size` documents: its own, related ones, then any others.

    RULER takes a question's own documents all; where they do not fit, those with the answer come first here.
    """
    question = source.questions[number % len(source.questions)]
    near = [*question.documents, *rng.sample(question.related, len(question.related))]
    far = sorted(set(range(len(source.documents))) - set(near))
    chosen = [*near, *rng.sample(far, len(far))][:size]
    while len(chosen) < size:  # RULER repeats its documents where there are too few
        chosen += range(min(size - len(chosen), len(source.documents)))
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {i}:\n{source.documents[n]}" for i, n in enumerate(chosen, 1))
    return Prompt(_TEXT.format(context=context, query=question.query), " Answer:", list(question.answers))
