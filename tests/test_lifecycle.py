"""Everything `generate` and its users do with a cache: the lossless preset must give DynamicCache's tokens."""

import copy
import dataclasses

import pytest
import torch
from conftest import CACHE
from transformers import DynamicCache

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

# Small enough that short prompts are packed, in several segments, and decoding packs some more.
SMALL = dict(min_length=16, min_segment_length=48, segment_length=64, recent_window=9, buffer_tokens=8, sink_tokens=3)
LOSSLESS = dataclasses.replace(MosaicKVConfig.preset("lossless"), **SMALL)
LOSSY = dataclasses.replace(MosaicKVConfig.preset("default"), **SMALL, min_attended_tokens=16)
LOSSY = dataclasses.replace(LOSSY, key_dense_channels=8, value_dense_channels=4)


def prompt(model, length, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)


def left_padded(model, lengths, seed=0):
    ids = prompt(model, max(lengths), len(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return ids.masked_fill(mask == 0, model.config.pad_token_id), mask


def generate(model, ids, cache, mask=None, new_tokens=24, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False,
        **{CACHE: cache}, **kwargs,
    )  # fmt: skip


def assert_same(model, run):
    """`run(cache)` gives the same tokens with either cache, and touches no dense K or V in ours."""
    mosaic = MosaicKVCache(LOSSLESS)
    assert torch.equal(run(DynamicCache()), run(mosaic))
    stats = mosaic.stats()
    assert stats.segments > 0
    assert stats.dense_materializations == 0


def test_greedy(model):
    ids = prompt(model, 150)
    assert_same(model, lambda cache: generate(model, ids, cache, new_tokens=64))


def test_short_prompt_grows_into_packed(model):
    ids = prompt(model, 3)
    assert_same(model, lambda cache: generate(model, ids, cache, new_tokens=64))


def test_left_padded_batch(model):
    ids, mask = left_padded(model, (120, 37, 5))
    assert_same(model, lambda cache: generate(model, ids, cache, mask))


def test_beams(model):
    ids, mask = left_padded(model, (101, 77))
    assert_same(model, lambda cache: generate(model, ids, cache, mask, num_beams=4, num_return_sequences=2))


def test_prefill_in_chunks(model):
    ids, mask = left_padded(model, (140, 40))
    assert_same(model, lambda cache: generate(model, ids, cache, mask, prefill_chunk_size=32))


def test_chat(model):
    first, second = prompt(model, 90), prompt(model, 20, seed=1)

    def run(cache):
        answered = generate(model, first, cache)
        return generate(model, torch.cat([answered, second], dim=1), cache)

    assert_same(model, run)


def test_chat_in_inference_mode_and_out_of_it(model):
    first, second = prompt(model, 90), prompt(model, 20, seed=1)

    def run(cache):
        with torch.inference_mode():
            answered = generate(model, first, cache)
        return generate(model, torch.cat([answered.clone(), second], dim=1), cache)

    assert_same(model, run)


def test_prompt_lookup(model):
    ids = prompt(model, 40).repeat(1, 3)
    assert_same(model, lambda cache: generate(model, ids, cache, prompt_lookup_num_tokens=4))


def test_assisted_decoding(model):
    ids = prompt(model, 100)
    assert_same(model, lambda cache: generate(model, ids, cache, assistant_model=model))


def test_crop_and_continue(model):
    ids = prompt(model, 150)

    def run(cache):
        tokens = generate(model, ids, cache)
        for count in (2, 30, 100):  # in the raw window, into segments, through several
            cache.crop(-count)
            assert cache.get_seq_length() == tokens.shape[1] - 1 - count
            tokens = generate(model, torch.cat([tokens[:, : -1 - count], prompt(model, 8, seed=count)], dim=1), cache)
        return tokens

    assert_same(model, run)


def test_reset_and_reuse(model):
    def run(cache):
        generate(model, prompt(model, 80), cache)
        if isinstance(cache, DynamicCache):
            cache = DynamicCache()
        else:
            cache.reset()
            assert cache.get_seq_length() == 0 and cache.stats().bytes == 0
        return generate(model, prompt(model, 90, batch=2, seed=1), cache)

    mosaic = MosaicKVCache(LOSSLESS)
    assert torch.equal(run(DynamicCache()), run(mosaic)) and mosaic.stats().segments > 0


def test_rows_selected_and_repeated(model):
    ids, mask = left_padded(model, (110, 60, 80))

    def run(cache):
        tokens = generate(model, ids, cache, mask)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([2, 2, 0, 0])
        ones = torch.ones(4, tokens.shape[1] - ids.shape[1] + 6, dtype=torch.long)
        more = torch.cat([tokens[rows], prompt(model, 6, batch=4, seed=2)], dim=1)
        return generate(model, more, cache, torch.cat([mask[rows], ones], dim=1))

    assert_same(model, run)


def test_deepcopy_goes_its_own_way(model):
    ids, more = prompt(model, 100), prompt(model, 30, seed=5)

    def run(cache):
        tokens = generate(model, ids, cache)
        twin = copy.deepcopy(cache)
        first = generate(model, torch.cat([tokens, more], dim=1), twin)
        second = generate(model, torch.cat([tokens, more.flip(1)], dim=1), cache)
        return torch.cat([first, second])

    assert_same(model, run)


def test_from_cache_serves_many_questions(model):
    ids, mask = left_padded(model, (130, 70))
    questions = prompt(model, 12, batch=6, seed=3)
    full = DynamicCache()
    model(ids, attention_mask=mask, **{CACHE: full})
    mosaic = MosaicKVCache.from_cache(full, mask, LOSSLESS)
    before = mosaic.stats().bytes
    outputs = []
    for cache in (full, mosaic):
        cache.batch_repeat_interleave(3)
        if cache is mosaic:
            assert cache.stats().bytes_by_kind["values"] == mosaic.stats().bytes_by_kind["values"]
            assert cache.stats().bytes < 2 * before
        more = torch.cat([ids.repeat_interleave(3, 0), questions], dim=1)
        more_mask = torch.cat([mask.repeat_interleave(3, 0), torch.ones_like(questions)], dim=1)
        outputs.append(generate(model, more, cache, more_mask))
    assert torch.equal(*outputs)


def test_beams_store_their_prompt_once(model):
    ids = prompt(model, 150)
    one, four = MosaicKVCache(LOSSLESS), MosaicKVCache(LOSSLESS)
    generate(model, ids, one, new_tokens=2)
    generate(model, ids, four, new_tokens=2, num_beams=4)
    assert four.stats().bytes_by_kind["values"] == one.stats().bytes_by_kind["values"]
    assert four.stats().bytes_bf16 == 4 * one.stats().bytes_bf16


def test_a_row_alone_and_in_a_padded_batch(model):
    """With lossy compression too: segments and blocks start at a row's first real token."""
    ids, mask = left_padded(model, (150, 90, 33))
    together = generate(model, ids, MosaicKVCache(LOSSY), mask)
    for row in range(3):
        start = int(mask[row].argmax())
        alone = generate(model, ids[row : row + 1, start:], MosaicKVCache(LOSSY))
        assert torch.equal(alone[0], together[row, start:])


@pytest.mark.parametrize("implementation", ["eager", "mosaickv"])
def test_other_attention_implementations(model, implementation):
    ids, mask = left_padded(model, (120, 60))
    expected = generate(model, ids, DynamicCache(), mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        cache = MosaicKVCache(LOSSLESS)
        assert torch.equal(generate(model, ids, cache, mask), expected)
    finally:
        model.set_attn_implementation(before)
    assert (cache.stats().dense_materializations == 0) == (implementation == "mosaickv")
