"""Prompts, answer lengths and rules of LongBench's English tasks, as LongBench (MIT licence) publishes them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task's prompt, with the fields {context} and {input}, and the longest answer in tokens."""

    prompt: str
    max_new_tokens: int


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)

TASKS = {
    "narrativeqa": Task(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer "
        "the question asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\n"
        "Story: {context}\n\n"
        "Now, answer the question based on the story asconcisely as you can, using a single phrase if "
        "possible. Do not provide any explanation.\n\n"
        "Question: {input}\n\n"
        "Answer:",
        128,
    ),
    "qasper": Task(
        "You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a single phrase or sentence if possible. If the question cannot be answered based on the "
        'information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
        "Article: {context}\n\n"
        " Answer the question based on the above article as concisely as you can, using a single phrase "
        "or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". Do not provide any explanation.\n\n'
        "Question: {input}\n\n"
        "Answer:",
        128,
    ),
    "multifieldqa_en": Task(
        "Read the following text and answer briefly.\n\n"
        "{context}\n\n"
        "Now, answer the following question based on the above text, only give me the answer and do not "
        "output any other words.\n\n"
        "Question: {input}\n"
        "Answer:",
        64,
    ),
    "hotpotqa": Task(_PASSAGES, 32),
    "2wikimqa": Task(_PASSAGES, 32),
    "musique": Task(_PASSAGES, 32),
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n"
        "{context}\n\n"
        "Now, write a one-page summary of the report.\n\n"
        "Summary:",
        512,
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or more sentences.\n\n"
        "Transcript:\n"
        "{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\n"
        "Answer:",
        512,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n"
        "{context}\n\n"
        "Now, write a one-page summary of all the news.\n\n"
        "Summary:",
        512,
    ),
    "trec": Task(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
    ),
    "triviaqa": Task(
        "Answer the question based on the given passage. Only give me the answer and do not output any "
        "other words. The following are some examples.\n\n"
        "{context}\n\n"
        "{input}",
        32,
    ),
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
    ),
    "passage_count": Task(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read these paragraphs and determine how many unique paragraphs there are after "
        "removing duplicates. In other words, how many non-repeating paragraphs are there in total?\n\n"
        "{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format "
        "should only contain the number, such as 1, 2, 3, and so on.\n\n"
        "The final answer is: ",
        32,
    ),
    "passage_retrieval_en": Task(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph "
        "the abstract is from.\n\n"
        "{context}\n\n"
        "The following is an abstract.\n\n"
        "{input}\n\n"
        "Please enter the number of the paragraph that the abstract is from. The answer format must be "
        'like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
    ),
    "lcc": Task(
        "Please complete the code given below. \n{context}Next line of code:\n",
        64,
    ),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
    ),
}
NOT_CHATS = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
"""Tasks whose prompts are examples or code to go on with, given without a chat template."""
ENDS_WITH_LINE = ("samsum",)
"""Tasks whose answer is a line: a newline ends it, though not as the first token."""
BY_LENGTH = tuple(name for name in TASKS if name not in ("narrativeqa", "musique", "qmsum"))
"""Tasks of LongBench-E."""
LENGTHS = {4000: "0-4k", 8000: "4-8k"}
"""LongBench-E's ranges of length in words, by their end; longer ones are "8k+"."""


def length_range(words: int) -> str:
    """The range of LongBench-E that a row of so many words belongs to."""
    return next((name for end, name in LENGTHS.items() if words < end), "8k+")
