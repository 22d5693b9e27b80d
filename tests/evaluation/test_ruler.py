"""RULER's tasks against the public definition, on tiny samples."""

import json
import random
import re
import uuid

import pytest
from demo_model import demo_model_path
from transformers import AutoTokenizer

from eval.errors import EvalError
from eval.ruler import niah, variable_tracking
from eval.ruler.fitting import largest
from eval.ruler.rows import row_samples
from eval.ruler.sources import hotpotqa, squad, words
from eval.ruler.tasks import NAMES, Sources, make_prompt, make_samples

# Words are tokens here, so that sizes are small and known; the real tokenizer has a test of its own.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NUMBER, UUID = r"[1-9]\d{6}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    paragraphs = [
        {"context": f"Town {i} lies on river {i}.", "qas": [
            {"question": f"Where is town {i}?", "answers": [{"text": f"river {i}"}, {"text": f"on river {i}"}]},
            {"question": f"Who rules town {i}?", "answers": [], "is_impossible": True},
        ]}
        for i in range(6)
    ]  # fmt: skip
    (folder / "squad.json").write_text(
        json.dumps({"data": [{"paragraphs": paragraphs[:3]}, {"paragraphs": paragraphs[3:]}]})
    )
    hotpot = [
        {
            "question": f"Question {i}?",
            "answer": f"answer {i}",
            "context": [[f"Title {i}-{j}", ["First. ", f"Second {i} {j}."]] for j in range(10)],
            "supporting_facts": [[f"Title {i}-7", 0], [f"Title {i}-2", 1]],
        }
        for i in range(3)
    ]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return Sources(squad=str(folder / "squad.json"), hotpotqa=str(folder / "hotpot.json"))


def words_of(prompt):
    return len((prompt.text + prompt.answer_prefix).split())


def make(name, sources, length=600, seed=1000):
    return make_prompt(name, length, seed, sources, words_of)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_fill_the_length_and_repeat_with_the_seed(name, sources):
    prompt, task = make(name, sources)
    assert words_of(prompt) + task.max_new_tokens <= 600
    again, _ = make(name, sources)
    other, _ = make(name, sources, seed=1001)
    assert prompt == again
    assert prompt != other
    # One unit more would not fit: units of these tasks have at most so many words.
    assert words_of(prompt) + task.max_new_tokens > 600 - 60


SINGLE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)


@pytest.mark.parametrize(
    ("name", "template", "kind", "value", "keys", "needles", "asked"),
    [
        ("niah_single_1", SINGLE, "numbers", NUMBER, 1, 1, 1),
        ("niah_single_2", SINGLE, "numbers", NUMBER, 1, 1, 1),
        ("niah_single_3", SINGLE, "uuids", UUID, 1, 1, 1),
        ("niah_multikey_1", SINGLE, "numbers", NUMBER, 4, 4, 1),
        ("niah_multikey_2", SINGLE, "numbers", NUMBER, None, None, 1),
        ("niah_multikey_3", SINGLE, "uuids", UUID, None, None, 1),
        ("niah_multivalue", SEVERAL, "numbers", NUMBER, 1, 4, 1),
        ("niah_multiquery", SEVERAL, "numbers", NUMBER, 4, 4, 4),
    ],
)
def test_niah(name, template, kind, value, keys, needles, asked, sources):
    prompt, task = make(name, sources)
    assert (task.max_new_tokens, task.match) == (128, "all")
    key = UUID if name == "niah_multikey_3" else r"[A-Za-z]\S*-\S+"
    found = re.findall(rf"One of the special magic {kind} for ({key}) is: ({value})\.", prompt.text)
    assert len(found) == prompt.text.count("One of the special magic")
    if needles is None:  # needles all the way down: every line is one, with a key of its own
        lines = prompt.text.split("\n")[1:-1]
        assert len(lines) == len(found) == len(set(k for k, _ in found)) > 10
    else:
        assert (len(set(k for k, _ in found)), len(found)) == (keys, needles)
    hidden = {}
    for k, v in found:
        hidden.setdefault(k, []).append(v)
    begin, end, prefix = template
    query = re.search(r"for (.*) mentioned in the provided text\?$", prompt.text).group(1)
    names = query.replace(", and ", ", ").split(", ")
    assert len(names) == asked
    assert sorted(prompt.answers) == sorted(v for k in names for v in hidden[k])
    fields = {"kind": kind.removesuffix("s") if template is SINGLE else kind, "query": query}
    assert prompt.text.startswith(begin.format(**fields))
    assert prompt.text.endswith(end.format(**fields))
    assert prompt.answer_prefix == prefix.format(**fields)
    if name == "niah_single_1":
        lines = prompt.text.split("\n")[1:-1]
        assert [line for line in lines if line != NOISE] == [line for line in lines if "magic" in line]


def test_needles_lie_at_forty_depths_of_an_essay():
    assert niah.DEPTHS[0] == 0 and niah.DEPTHS[-1] == 100 and len(set(niah.DEPTHS)) == 40
    essay = " ".join(f"Sentence number {i}." for i in range(100)).split()
    places = set()
    for seed in range(300):
        prompt = niah.build(random.Random(seed), 300, haystack="essay", essay=essay)
        before = prompt.text.split("One of the special")[0]
        places.add(before.count("Sentence number"))
    assert places == set(niah.DEPTHS)  # 100 sentences: a depth in percent is a place


def test_variable_tracking(sources):
    prompt, task = make("vt", sources, 900)
    assert (task.max_new_tokens, task.match) == (30, "all")
    example, question = prompt.text.split("\n\nMemorize and track")
    question = "Memorize and track" + question
    for text, prefix, letters in ((example, None, 3), (question, prompt.answer_prefix, 5)):
        assert text.startswith(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        )
        first = re.search(rf"VAR ([A-Z]{{{letters}}}) = (\d{{5}})\n", text)
        name, value = first.groups()
        chain = [name]
        for new, old in re.findall(rf"VAR ([A-Z]{{{letters}}}) = VAR ([A-Z]{{{letters}}}) ?\n", text):
            assert old == chain[-1]  # in order of the text
            chain.append(new)
        assert len(set(chain)) == 5
        asked = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
        answer = (
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"5 variables are assigned the value {value}, they are: "
        )
        if prefix is None:  # the worked example carries its answer
            assert text.endswith(asked + answer + " " + " ".join(chain))
        else:
            assert text.endswith(asked) and prefix == answer and prompt.answers == chain
    assert question.count(NOISE) >= variable_tracking.HOPS + 1


@pytest.mark.parametrize(("length", "repeats"), [(900, ((20, 3, 1), (6, 1))), (4096, ((40, 10, 3), (30, 3)))])
def test_common_words(length, repeats, sources):
    prompt, task = make("cwe", sources, length)
    assert (task.max_new_tokens, task.match) == (120, "all")
    (example_size, *example_repeats), question_repeats = repeats
    begin = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    parts = prompt.text.split(begin)[1:]
    assert len(parts) == 2
    for part, (common, other) in zip(parts, (example_repeats, question_repeats)):
        listed, rest = part.split("\nQuestion: What are the 10 most common words in the above list?")
        items = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", listed)
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        counts = {word: sum(w == word for _, w in items) for _, word in items}
        assert set(counts) <= set(words("all"))
        top = {word for word, count in counts.items() if count == common}
        assert len(top) == 10 and set(counts.values()) == {common, other}
        if part is parts[0]:
            assert len(counts) == example_size
            named = re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", rest.removeprefix(prompt.answer_prefix))
            assert rest.startswith(prompt.answer_prefix) and set(named) == top
        else:
            assert set(prompt.answers) == top
    assert prompt.answer_prefix == " Answer: The top 10 words that appear most often in the list are:"


def test_frequent_words(sources):
    prompt, task = make("fwe", sources, 2048)
    assert (task.max_new_tokens, task.match) == (50, "all")
    begin = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. "
    )
    end = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    assert prompt.text.startswith(begin) and prompt.text.endswith(end)
    listed = prompt.text.removeprefix(begin).removesuffix(end).split()
    counts = sorted(((listed.count(word), word) for word in set(listed)), reverse=True)
    assert counts[0][1] == "..." and [word for _, word in counts[1:4]] == prompt.answers
    assert all(re.fullmatch("[a-z]{6}", word) for _, word in counts[1:])
    # Zeta distribution of exponent 2: rank r has 1/r^2 of the first one's count.
    assert [count for count, _ in counts[1:4]] == pytest.approx([counts[0][0] / r**2 for r in (2, 3, 4)], abs=1)
    expected = " Answer: According to the coded text above, the three most frequently appeared words are:"
    assert prompt.answer_prefix == expected


def test_questions_on_documents(sources):
    prompt, task = make("qa_1", sources, 130, seed=1)
    assert (task.max_new_tokens, task.match) == (32, "part")
    assert prompt.answers == ["river 1", "on river 1"]
    ask = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    assert prompt.text.startswith(f"{ask}\n\nThe following are given documents.\n\nDocument 1:\n")
    assert prompt.text.endswith(f"\n\n{ask}\n\nQuestion: Where is town 1?") and prompt.answer_prefix == " Answer:"
    documents = re.findall(r"Document \d+:\n(.*)\n", prompt.text)
    # Its own document and those of its article come first.
    assert {"Town 0 lies on river 0.", "Town 1 lies on river 1.", "Town 2 lies on river 2."} <= set(documents)
    questions = hotpotqa(sources.hotpotqa)
    assert len(squad(sources.squad).questions) == 6  # the impossible ones are left out
    titles = [questions.documents[i].split("\n")[0] for i in questions.questions[0].documents]
    assert titles[:2] == ["Title 0-2", "Title 0-7"] and len(titles) == 10


@pytest.mark.parametrize(("top", "found"), [(2, None), (3, 3), (9, 9), (10, 10), (11, 11), (1000, 1000)])
def test_largest(top, found):
    assert largest(lambda n: n <= top, 3, 10) == found


def test_uuids_are_of_version_four():
    assert uuid.UUID(niah._random(random.Random(0), "uuids")).version == 4


@pytest.mark.slow
def test_lengths_never_exceed_the_limit_with_a_real_tokenizer(sources):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    samples = list(make_samples(tokenizer, NAMES, [1100], 2, 5, sources, True))
    assert len({sample.id for sample in samples}) == 26
    for sample in samples:
        assert len(sample.input_ids) + sample.max_new_tokens <= 1100
        text = tokenizer.decode(sample.input_ids)
        assert "<|im_start|>assistant\n" in text.rstrip(" ")[-300:]


def test_missing_and_malformed_sources(tmp_path, sources):
    with pytest.raises(EvalError, match=r"qa_1 needs --squad.*leave qa_1 out"):
        make("qa_1", Sources())
    with pytest.raises(EvalError, match=r"no file .*nowhere\.json"):
        make("qa_2", Sources(hotpotqa=str(tmp_path / "nowhere.json")))
    broken = tmp_path / "broken.json"
    broken.write_text('{"data": [\n{]}')
    with pytest.raises(EvalError, match=r"broken\.json, line 2: not JSON"):
        squad(str(broken))
    broken.write_text('{"rows": []}')
    with pytest.raises(EvalError, match="no field 'data'"):
        squad(str(broken))
    with pytest.raises(EvalError, match=r"niah_multikey_3 does not fit into 60 tokens"):
        make("niah_multikey_3", sources, 60)
    broken.write_text('{"data": [{"paragraph": []}]}')
    with pytest.raises(EvalError, match=r"broken\.json does not have SQuAD's fields \(KeyError\('paragraphs'\)\)"):
        squad(str(broken))
    with pytest.raises(EvalError, match="cwe has too few words for 200000 tokens"):
        make("cwe", sources, 200_000)


def test_ready_made_rows(tmp_path, byte_tokenizer):
    row = dict(context="a b", question="c?", answer_prefix=" d", answer=["x"], task="qa_1", max_new_tokens=7)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"task": t}) + "\n" for t in ("qa_1", "vt", "qa_1", "qa_1")))
    samples = list(row_samples(byte_tokenizer, str(path), None, ["qa_1"], 2, True))
    assert [sample.id for sample in samples] == ["qa_1/rows/0", "qa_1/rows/1"]
    assert samples[0].metric == ("ruler", "part") and samples[0].max_new_tokens == 7
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"answer": "x"}) + "\n")
    with pytest.raises(EvalError, match=r"rows\.jsonl, line 2: field 'answer' must be a list"):
        list(row_samples(byte_tokenizer, str(path), None, ["qa_1"], 9, True))
    path.write_text(json.dumps(row | {"answer": []}))
    with pytest.raises(EvalError, match=r"line 1: field 'answer' must be a list of texts, got \[\]"):
        list(row_samples(byte_tokenizer, str(path), None, ["qa_1"], 9, True))
    path.write_text(json.dumps(row | {"task": "vtt"}))
    with pytest.raises(EvalError, match=r"rows\.jsonl, line 1: unknown task 'vtt'; there are niah_single_1"):
        list(row_samples(byte_tokenizer, str(path), None, ["qa_1"], 9, True))
    path.write_text("{\n")
    with pytest.raises(EvalError, match=r"rows\.jsonl, line 1: not JSON"):
        list(row_samples(byte_tokenizer, str(path), None, ["qa_1"], 9, True))
