"""Models that are not served by packed attention, or not by it alone, and what has no packed meaning."""

import dataclasses

import pytest
import torch
from conftest import CACHE, tiny_model
from features import NO_END, generate, ids
from others import OTHERS, make
from test_conformance import NEWEST, PRESETS
from transformers import DynamicCache, EncoderDecoderCache

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

CROSS = ("T5", "BART")


def answer(model, cache):
    """Long enough for a decoder without a prompt to pack something."""
    tokens, mask = ids(batch=2), torch.ones(2, 90, dtype=torch.int64)
    mask[1, :31] = 0
    return generate(model, tokens.masked_fill(mask == 0, 0), cache, mask, max_new_tokens=100, min_new_tokens=100)


def cache_of(model, preset):
    ours = MosaicKVCache(PRESETS[preset], config=None if model.config.is_encoder_decoder else model.config)
    return EncoderDecoderCache(ours, DynamicCache()) if model.config.is_encoder_decoder else ours


def dynamic_cache_of(model):
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("name", OTHERS)
def test_lossless_is_dynamic_cache(name):
    model = make(name)
    cache = cache_of(model, "lossless")
    ours = answer(model, cache)
    assert torch.equal(ours, answer(model, dynamic_cache_of(model)))
    stats = getattr(cache, "self_attention_cache", cache).stats()
    assert stats.segments > 0
    if NEWEST:
        assert (stats.dense_materializations == 0) == OTHERS[name].packed


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_to_our_cache_is_dense(name):
    """It is asked for once and then read: K and V stay raw, and are right."""
    model = make(name)
    cache = EncoderDecoderCache(MosaicKVCache(PRESETS["lossless"]), MosaicKVCache(PRESETS["lossless"]))
    assert torch.equal(answer(model, cache), answer(model, dynamic_cache_of(model)))
    assert cache.cross_attention_cache.stats().dense_materializations > 0


def test_one_cache_for_self_and_cross_attention_is_refused():
    """`DynamicCache` mixes up their tokens without a word."""
    cache, states = MosaicKVCache(PRESETS["lossless"]), torch.randn(1, 4, 7, 16)
    cache.update(states, states, 0)
    keys, values = cache.update(states, states, 0)
    with pytest.raises(ValueError, match=r"`query` has 1 tokens.*EncoderDecoderCache"):
        torch.nn.functional.scaled_dot_product_attention(states[:, :, :1], keys, values)


@pytest.mark.parametrize("preset", PRESETS)
def test_output_attentions_in_eager_mode(preset):
    """Weights over what the cache holds; SDPA gives none, with any cache."""
    model = tiny_model("llama-group1")
    model.set_attn_implementation("eager")
    cache = MosaicKVCache(PRESETS[preset])
    settings = dict(max_new_tokens=40, return_dict_in_generate=True, output_attentions=True, do_sample=False)
    out = model.generate(ids(), **{CACHE: cache}, **settings, **NO_END)
    weights = out.attentions[-1][0]
    assert weights.shape == (1, 4, 1, 129)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 1))
    if preset == "lossless":
        full = model.generate(ids(), **{CACHE: DynamicCache()}, **settings, **NO_END)
        torch.testing.assert_close(weights, full.attentions[-1][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.enable_grad()  # other modules' tests turn it off
def test_gradients_through_a_prompt_and_not_through_packed_tokens(implementation):
    model = tiny_model("llama-group1")
    model.set_attn_implementation(implementation)
    cache = MosaicKVCache(PRESETS["lossless"])
    first = model(ids(), **{CACHE: cache}).logits
    if implementation == "sdpa":
        full = model(ids()).logits
        gradients = (torch.autograd.grad(out.sum(), model.lm_head.weight)[0] for out in (first, full))
        torch.testing.assert_close(*gradients)
    second = model(ids(1), **{CACHE: cache}).logits
    with pytest.raises(RuntimeError, match=r"MosaicKVCache has no gradients.*no_grad"):
        second.sum().backward()


def test_reading_and_setting_a_layers_keys():
    cache, states = MosaicKVCache(PRESETS["lossless"]), torch.randn(2, 1, 2, 80, 16)
    cache.update(*states, 0)
    cache.update(*states[:, :, :, :1], 0)
    layer = cache.layers[0]
    assert torch.equal(layer.keys[:, :, :80], states[0]) and torch.equal(layer.values[:, :, :80], states[1])
    assert layer.materializations == 2
    with pytest.raises(AttributeError, match=r"keys.*cannot be set"):
        layer.keys = states[0]


def test_float64_is_kept_as_float32():
    states = torch.randn(2, 1, 2, 200, 32, dtype=torch.float64)
    for raw_bits in (16, "native"):
        cache = MosaicKVCache(dataclasses.replace(MosaicKVConfig(), min_length=16, raw_bits=raw_bits))
        for part in states.split((150, *[1] * 50), dim=3):
            keys, values = cache.update(*part, 0)
            query = part[0].repeat(1, 2, 1, 1)
            mask = torch.ones(part.shape[3], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - part.shape[3])
            out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
            assert out.dtype == torch.float64 and out.isfinite().all()
        assert cache.stats().segments > 0
