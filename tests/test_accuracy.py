"""The default preset on the real SmolLM2, against DynamicCache; `scripts/check_accuracy.py` measures more."""

import statistics

import pytest
import torch
from check_accuracy import divergence, greedy
from conftest import CACHE
from demo_model import demo_model_path
from needle import make_needle, prompt_ids
from transformers import AutoTokenizer

from mosaickv_hf import MosaicKVCache

SEEDS = range(1000, 1003)
FOLLOW_UP = "<|im_end|>\n<|im_start|>user\nWrite the number again, and where it was.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


pytestmark = [pytest.mark.parametrize("model", ["smollm2"], indirect=True, scope="session"), pytest.mark.slow]


def forward(model, ids, cache, chunk=None):
    """The last log probabilities `[vocabulary]` after a prompt, in chunks if asked."""
    past = cache.get_seq_length()
    for part in ids.split(chunk or ids.shape[1], dim=1):
        past += part.shape[1]
        mask = torch.ones(1, past, dtype=torch.long)
        logits = model(part, attention_mask=mask, logits_to_keep=1, **{CACHE: cache}).logits[0, -1]
    return logits.log_softmax(-1)


def answer_of(model, tokenizer, first, full):
    """The ids of full's answer, and its log probabilities `[answer's length, vocabulary]` from the prompt's end on."""
    answer, rest = greedy(model, tokenizer, first, full)
    return answer, torch.cat([first[None], rest])


def kl_of_answer(model, answer, truth, first, mosaic):
    """The mean KL over the tokens of full's answer, which `mosaic` takes; `first` is what it says to the prompt."""
    at_start = float((truth[0].exp() * (truth[0] - first)).sum())
    # The last token is not fed; both caches end with the same ones.
    rest = divergence(model, answer, truth[1:], mosaic) * (len(truth) - 1)
    return (at_start + rest) / len(truth)


def test_second_turn_and_chunks_are_as_good_as_the_first_turn(model, tokenizer):
    first_turns, second_turns, chunked = [], [], []
    second = tokenizer(FOLLOW_UP, return_tensors="pt", add_special_tokens=False).input_ids
    for seed in SEEDS:
        ids = prompt_ids(tokenizer, make_needle(tokenizer, 2100, 2, seed).text)
        raw = MosaicKVCache("raw")
        first = forward(model, ids, raw)
        full, mosaic, in_chunks = raw.to_dynamic_cache(), MosaicKVCache.from_cache(raw), MosaicKVCache()
        answer, truth = answer_of(model, tokenizer, first, full)
        first_turns.append(kl_of_answer(model, answer, truth, first, mosaic))
        first = forward(model, ids, in_chunks, chunk=512)
        chunked.append(kl_of_answer(model, answer, truth, first, in_chunks))
        answer, truth = answer_of(model, tokenizer, forward(model, second, full), full)
        second_turns.append(kl_of_answer(model, answer, truth, forward(model, second, mosaic), mosaic))
    first = statistics.fmean(first_turns)
    # Steps follow the first turn's question, so the first turn is the easier one: 0.0045 against 0.0073 when recorded.
    assert statistics.fmean(second_turns) <= 2 * first
    assert statistics.fmean(chunked) <= 2 * first
