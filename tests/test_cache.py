"""What a user meets besides tokens: errors, statistics, capabilities, and other layers' caches."""

import copy
import dataclasses
import gc
import inspect
import os
import subprocess
import sys

import pytest
import torch
from conftest import CACHE, TINY
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.layer import MosaicKVLayer
from mosaickv_hf.segments import PackedSegment

SMALL = dict(min_length=16, min_segment_length=48, recent_window=9, buffer_tokens=8, sink_tokens=3)
CONFIG = dataclasses.replace(MosaicKVConfig.preset("default"), **SMALL, min_attended_tokens=32)


def states(n, batch=1, heads=2, head_dim=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, n, head_dim, generator=generator).to(dtype) for _ in "kv")


def step(cache, n, layer=0, **kwargs):
    """An update with its attention, as a model does it."""
    keys, values = cache.update(*states(n, **kwargs), layer)
    query = states(n, **kwargs)[0]
    seen = torch.ones(n, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - n)
    return scaled_dot_product_attention(query, keys, values, seen if n > 1 else None)


def snapshot(cache):
    dense = [layer.materialize(kind) for layer in cache.layers if layer.is_initialized for kind in ("key", "value")]
    return cache.get_seq_length(), dense


def assert_unchanged(cache, before):
    length, dense = snapshot(cache)
    assert length == before[0]
    assert all(torch.equal(a, b) for a, b in zip(dense, before[1], strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(batch=2), "batch size"),
        (dict(heads=1), "number of heads"),
        (dict(head_dim=32), "head_dim"),
        (dict(dtype=torch.float16), "dtype"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, words):
    cache = MosaicKVCache(CONFIG)
    step(cache, 80)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=f"key_states.*{words}"):
        cache.update(*states(1, **change), 0)
    assert_unchanged(cache, before)


def test_another_device_is_refused():
    cache = MosaicKVCache(CONFIG)
    step(cache, 80)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"device.*cpu.*meta"):
        cache.update(*(x.to("meta") for x in states(1)), 0)
    assert_unchanged(cache, before)


def test_keys_and_values_that_do_not_go_together():
    cache = MosaicKVCache(CONFIG)
    with pytest.raises(ValueError, match="value_states"):
        cache.update(states(3)[0], states(4)[1], 0)
    with pytest.raises(ValueError, match="4 dimensions"):
        cache.update(states(3)[0][0], states(3)[1][0], 0)
    assert cache.get_seq_length() == 0


def test_channels_that_groups_leave_over_are_dense():
    cache = MosaicKVCache(dataclasses.replace(CONFIG, group_size=5))
    step(cache, 80)
    assert step(cache, 1).isfinite().all()
    segment = cache.layers[0].rows[0].segments[0]
    assert [part.basis.scale.shape[1] for part in (segment.keys, segment.values)] == [19, 4]


def test_a_crop_that_dynamic_cache_refuses():
    cache, full = MosaicKVCache(CONFIG), DynamicCache()
    step(cache, 80)
    full.update(*states(80), 0)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"-81.*80 tokens"):
        cache.crop(-81)
    assert_unchanged(cache, before)
    try:
        full.crop(50)
    except ValueError:
        with pytest.raises(ValueError, match="50"):
            cache.crop(50)
        assert_unchanged(cache, before)
    else:  # older Transformers crop to this length
        cache.crop(50)
        assert cache.get_seq_length() == full.get_seq_length() == 50
    cache.crop(0)
    assert cache.get_seq_length() == full.get_seq_length() or cache.get_seq_length() == 80


def test_a_mask_of_another_length_is_refused():
    cache = MosaicKVCache(CONFIG)
    step(cache, 80)
    keys, values = cache.update(*states(1), 0)
    with pytest.raises(ValueError, match=r"attn_mask.*81"):
        scaled_dot_product_attention(states(1)[0], keys, values, torch.ones(1, 1, 1, 80, dtype=torch.bool))


def test_stale_handles_are_refused():
    cache = MosaicKVCache(CONFIG)
    step(cache, 80)
    keys, values = cache.update(*states(1), 0)
    step(cache, 1)
    with pytest.raises(RuntimeError, match="after a later change"):
        scaled_dot_product_attention(states(1)[0], keys, values)


def test_handles_are_tensors_of_everything_stored():
    """An operation we do not know gets dense tensors, and is counted; attending twice is fine."""
    cache = MosaicKVCache(dataclasses.replace(MosaicKVConfig.preset("lossless"), **SMALL))
    first, second = states(80), states(1, seed=1)
    keys, values = cache.update(*first, 0)
    assert keys.shape == first[0].shape and (keys.dtype, keys.device) == (torch.float32, first[0].device)
    scaled_dot_product_attention(first[0], keys, values, is_causal=True)
    assert cache.stats().dense_materializations == 0 and cache.stats().segments == 1
    keys, values = cache.update(*second, 0)
    once, twice = (scaled_dot_product_attention(second[0], keys, values) for _ in range(2))
    assert torch.equal(once, twice)
    assert torch.equal(keys + 0, torch.cat([first[0], second[0]], dim=2))
    assert torch.equal(values.mean(2), torch.cat([first[1], second[1]], dim=2).mean(2))
    assert type(keys * 2) is torch.Tensor
    assert cache.stats().dense_materializations == 3


def test_capabilities_are_those_of_dynamic_cache():
    cache, full = MosaicKVCache(CONFIG), DynamicCache()
    assert bool(cache) and len(cache) == 0 and not cache.is_initialized
    step(cache, 80)
    full.update(*states(80), 0)
    for name in (
        "is_compileable",
        "is_sliding",
        "is_initialized",
        *(["is_croppable"] if hasattr(full, "is_croppable") else []),
    ):
        assert getattr(cache, name) == getattr(full, name), name
    sizes = inspect.signature(full.get_mask_sizes).parameters
    query = 3 if "query_length" in sizes else torch.arange(80, 83)
    assert cache.get_mask_sizes(query, 0) == full.get_mask_sizes(query, 0) == (83, 0)
    assert cache.get_seq_length() == full.get_seq_length() == 80


def test_stats_count_every_byte_and_print():
    cache = MosaicKVCache(dataclasses.replace(CONFIG, **SMALL))
    empty = cache.stats()
    assert (empty.tokens, empty.bytes, empty.ratio) == (0, 0, 0.0)
    step(cache, 500)
    step(cache, 1)
    stats = cache.stats()
    assert stats.tokens == 501 and stats.bytes_bf16 == 501 * 2 * 64 * 2 * 2
    assert set(stats.bytes_by_kind) == {"values", "bitmaps", "rotations", "index", "raw", "open"}
    held = {}
    seen = set()

    def walk(x):
        if id(x) in seen or isinstance(x, (type, str, int, float)):
            return
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, (list, tuple)):
            [walk(y) for y in x]
        elif hasattr(x, "__dict__"):
            [walk(y) for y in vars(x).values()]

    walk(cache.layers)
    assert stats.bytes == sum(held.values())
    text = str(stats)
    assert "ratio" in text and f"{stats.bytes:,}" in text


def test_bytes_are_those_of_the_process():
    """The cache's own count against what the process gives back when the cache goes."""
    code = """
import gc, psutil, torch
from mosaickv_hf import MosaicKVCache
from torch.nn.functional import scaled_dot_product_attention as attend
torch.manual_seed(0)
cache = MosaicKVCache()
def fill(layer):
    keys, values = cache.update(torch.randn(1, 8, 4096, 128), torch.randn(1, 8, 4096, 128), layer)
    attend(torch.randn(1, 8, 4096, 128), keys, values, torch.ones(1, 4096, dtype=torch.bool))
process = psutil.Process()
fill(0)
gc.collect()
before, counted = process.memory_info().rss, cache.stats().bytes
for layer in range(1, 7):
    fill(layer)
gc.collect()
print((process.memory_info().rss - before) / (cache.stats().bytes - counted))
"""
    environment = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    assert 0.9 < float(done.stdout) < 1.1


def test_sliding_layers_get_their_own_cache():
    """With the model's config, sliding layers stay Transformers'; the tokens are DynamicCache's."""
    torch.manual_seed(0)
    shape = TINY["llama-group1"][1].to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "initializer_range", "pad_token_id")
    config = MistralConfig(
        **{k: shape[k] for k in names}, num_attention_heads=4, num_key_value_heads=2, sliding_window=20
    )
    model = MistralForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 256, (1, 90))
    lossless = dataclasses.replace(MosaicKVConfig.preset("lossless"), **SMALL)
    outputs, caches = [], []
    # Without the config a sliding layer is packed like any other, and its mask honoured.
    for cache in (DynamicCache(config=config), MosaicKVCache(lossless, config=config), MosaicKVCache(lossless)):
        kwargs = {CACHE: cache, "attention_mask": torch.ones_like(ids)}
        outputs.append(model.generate(ids, max_new_tokens=30, do_sample=False, **kwargs))
        caches.append(cache)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert all(isinstance(layer, DynamicSlidingWindowLayer) for layer in caches[1].layers)
    assert caches[2].stats().segments > 0


def test_from_cache_refuses_what_it_cannot_read():
    full = DynamicCache()
    full.update(*states(40, batch=2), 0)
    with pytest.raises(ValueError, match="attention_mask"):
        MosaicKVCache.from_cache(full, torch.ones(2, 39), CONFIG)
    with pytest.raises(ValueError, match="DynamicCache"):
        MosaicKVCache.from_cache(MosaicKVCache.from_cache(full, None, CONFIG))


def test_the_name_is_registered_with_its_masks():
    from transformers import AttentionMaskInterface

    assert "mosaickv" in AttentionInterface().valid_keys()
    assert "mosaickv" in AttentionMaskInterface().valid_keys()


def test_memory_goes_with_the_cache():
    # Other tests of the process may hold some.
    before = {id(x) for x in gc.get_objects() if type(x) is PackedSegment}
    cache = MosaicKVCache(CONFIG)
    step(cache, 200)
    segment = cache.layers[0].rows[0].segments[0]
    twin = copy.deepcopy(cache)
    del cache
    gc.collect()
    assert twin.layers[0].rows[0].segments[0] is segment
    held = [x for x in gc.get_objects() if type(x) is PackedSegment and id(x) not in before]
    assert len(held) == len(twin.layers[0].rows[0].segments)


def test_a_row_without_a_token_takes_part():
    """As in a batch whose first chunk is padding for one row; then beams."""
    cache = MosaicKVCache(CONFIG)
    cache.update(*states(1, batch=2), 0)
    cache.reset()
    layer = cache.layers[0]
    layer.fill(torch.randn(2, 2, 90, 64), torch.randn(2, 2, 90, 64), [0, None])
    cache.batch_repeat_interleave(2)
    dense = layer.materialize("key")
    assert dense.shape == (4, 2, 90, 64) and not dense[2:].any() and torch.equal(dense[0], dense[1])
    assert copy.deepcopy(cache).get_seq_length() == 90


def test_after_a_crop_to_the_sinks_nothing_is_left_of_the_segments():
    cache = MosaicKVCache(dataclasses.replace(CONFIG, **SMALL))
    step(cache, 200)
    step(cache, 1)
    row = cache.layers[0].rows[0]
    assert row.segments
    cache.crop(row.sinks[0].shape[1] - 201)
    assert row.sinks is None and not row.segments and row.length == cache.get_seq_length()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_changes_nothing(dtype):
    outputs = []
    for default in (torch.float32, dtype):
        torch.manual_seed(0)
        states = torch.randn(4, 1, 2, 201, 64, dtype=torch.float32)
        torch.set_default_dtype(default)
        try:
            layer = MosaicKVLayer(dataclasses.replace(CONFIG, **SMALL))
            layer.fill(states[0, ..., :200, :], states[1, ..., :200, :], [0])
            layer.update(states[0, ..., 200:, :], states[1, ..., 200:, :])
            outputs.append(layer.attend(states[2, ..., :1, :], None, 0.125, 1))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*outputs)
