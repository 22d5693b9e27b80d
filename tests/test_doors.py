"""Other ways into `generate` than calling it on a plain model."""

import dataclasses

import pytest
import torch
from conftest import CACHE, tiny_model
from transformers import pipeline

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

CONFIG = dataclasses.replace(
    MosaicKVConfig(), min_length=16, min_segment_length=48, recent_window=9, buffer_tokens=16, key_dense_channels=4
)
IDS = torch.randint(3, 256, (1, 90), generator=torch.Generator().manual_seed(0))


def tiny():
    return tiny_model("llama-group1", vocab_size=257)


def generate(model, cache, new_tokens=30):
    return model.generate(IDS, max_new_tokens=new_tokens, do_sample=False, **{CACHE: cache})


def test_a_compiled_model():
    """The graph breaks around the cache's calls; tokens are those of the plain model."""
    model = tiny()
    expected = generate(model, MosaicKVCache(CONFIG), 12)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    cache = MosaicKVCache(CONFIG)
    assert torch.equal(generate(model, cache, 12), expected)
    assert cache.stats().segments > 0 and cache.stats().dense_materializations == 0


def test_a_pipeline(byte_tokenizer):
    pipe = pipeline("text-generation", model=tiny(), tokenizer=byte_tokenizer)
    text = "It was the best of times, it was the worst of times. " * 3
    cache = MosaicKVCache("lossless")
    given = dict(max_new_tokens=10, do_sample=False, return_full_text=False)
    assert pipe(text, **given, **{CACHE: cache})[0]["generated_text"] == pipe(text, **given)[0]["generated_text"]
    assert cache.get_seq_length() == len(text) + 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    model = tiny().to(dtype)
    lossless = dataclasses.replace(MosaicKVConfig.preset("lossless"), min_length=16, recent_window=9, buffer_tokens=16)
    for compression in (lossless, CONFIG):
        cache = MosaicKVCache(compression)
        output = generate(model, cache)
        assert output.shape == (1, 120) and cache.stats().segments > 0
        logits = model(output[:, -1:], **{CACHE: cache}).logits
        assert logits.dtype == dtype and logits.isfinite().all()
