"""Unusual numbers in K and V, and unusual sizes: what is attended to is what is held, and that is near the truth."""

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

SMALL = dict(min_length=16, min_segment_length=48, recent_window=9, buffer_tokens=8, sink_tokens=3, token_ratio=1.0)
PRESETS = {name: dataclasses.replace(MosaicKVConfig.preset(name), **SMALL) for name in ("default", "paper", "lossless")}
# Of the dtype that attention works in, for outputs of unit size.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3}


def _outlier_channel(x):
    x[..., 3] += 3000
    return x


# What is made of normal numbers, and how near to it the default must come: by root mean squares, of K and V.
KINDS = {
    "all tokens equal": (lambda x: x[:, :, :1].expand_as(x).clone(), 0.02),
    "zero": (torch.zeros_like, 0.0),
    "one huge outlier channel": (_outlier_channel, 0.01),
    "as long as fp16 holds": (lambda x: x * (6.5e4 / x.norm(dim=-1).max()), 0.3),
    "small": (lambda x: x * 1e-3, 0.3),
    "constant, then another": (lambda x: torch.cat([torch.ones_like(x[:, :, :-1]), x[:, :, -1:]], dim=2), 0.02),
}


def run(config, keys, values, sizes, group=3):
    """Attention after each update of `sizes` tokens against that over what is held; the cache."""
    torch.manual_seed(1)
    cache, end = MosaicKVCache(config), 0
    size = keys.float().abs().max().clamp_min(1e-3)
    for n in sizes:
        begin, end = end, end + n
        ours = cache.update(keys[:, :, begin:end], values[:, :, begin:end], 0)
        mask = (torch.arange(end) <= torch.arange(begin, end)[:, None])[None, None]
        query = (torch.randn(1, keys.shape[1] * group, n, keys.shape[3]) / size).to(keys.dtype)
        output = scaled_dot_product_attention(query, *ours, attn_mask=mask, enable_gqa=True).float()
        held = keys[:, :, :end], values[:, :, :end]
        if begin:
            held = [cache.layers[0].materialize(kind) for kind in ("key", "value")]
        scale = values.float().square().mean().sqrt().clamp_min(1e-30)
        expected = scaled_dot_product_attention(query.float(), *(x.float() for x in held), mask, enable_gqa=True)
        tolerance = TOLERANCE[keys.dtype]
        torch.testing.assert_close(output / scale, expected / scale, rtol=tolerance, atol=tolerance)
    return cache


def test_autocast_changes_nothing_that_is_stored_or_computed():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 141, 80)
    query = torch.randn(1, 6, 1, 80)
    found = []
    for enabled in (False, True):
        cache = MosaicKVCache(PRESETS["default"])
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for part in (slice(140), slice(140, 141)):
                cache.update(keys[:, :, part], values[:, :, part], 0)
            layer = cache.layers[0]
            found.append((layer.attend(query, None, 0.1, 1), layer.materialize("key"), layer.materialize("value")))
    assert cache.stats().segments
    for one, other in zip(*found):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_unusual_numbers(preset, kind, dtype):
    make, nearness = KINDS[kind]
    torch.manual_seed(0)
    keys, values = (make(torch.randn(1, 2, 140, 80)).to(dtype) for _ in "kv")
    cache = run(PRESETS[preset], keys, values, (100, *[1] * 20, 20))
    assert cache.stats().segments > 0
    for name, given in (("key", keys), ("value", values)):
        error = (cache.layers[0].materialize(name).float() - given.float()).square().mean().sqrt()
        size = given.float().square().mean().sqrt()
        if preset == "lossless":
            assert error == 0
        elif preset == "default":
            assert error <= nearness * size + size * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("head_dim", "heads"), [(80, 2), (96, 1), (112, 3), (256, 1)])
def test_head_dims_and_single_heads(preset, head_dim, heads):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, heads, 130, head_dim)
    assert run(PRESETS[preset], keys, values, (100, *[1] * 30), group=1).stats().segments > 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("prompt", [1, 3, 12])
def test_prompts_shorter_than_what_stays_raw(preset, prompt):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 60, 32)
    cache = run(PRESETS[preset], keys, values, (prompt, *[1] * (60 - prompt)))
    assert cache.get_seq_length() == 60 and cache.stats().segments > 0


@pytest.mark.parametrize("wrong", [float("nan"), -float("inf"), 1e20])
@pytest.mark.parametrize("which", ["K", "V"])
@pytest.mark.parametrize("place", [50, 105])
def test_what_is_not_finite_is_told_when_it_would_be_packed(wrong, which, place):
    """In a prompt and in generated tokens; nothing is lost, and an attempt after `crop` goes on."""
    torch.manual_seed(0)
    states = torch.randn(2, 1, 2, 160, 32)
    states["KV".index(which), 0, 1, place, 7] = wrong
    cache = MosaicKVCache(PRESETS["default"])
    with pytest.raises(ValueError, match=rf"{which} of tokens to pack have NaN, infinity"):
        for begin, end in [(0, 100), *((n, n + 1) for n in range(100, 160))]:
            asked = end
            keys, values = cache.update(*states[:, :, :, begin:end], 0)
            scaled_dot_product_attention(torch.randn(1, 2, end - begin, 32), keys, values)
    # A prompt is packed when it is in, generated tokens before the next one is.
    length = cache.get_seq_length()
    assert length == (100 if asked == 100 else asked - 1)
    cache.crop(-(length - place))
    cache.update(*torch.randn(2, 1, 2, 1, 32), 0)
    for _ in range(40):
        keys, values = cache.update(*torch.randn(2, 1, 2, 1, 32), 0)
        assert scaled_dot_product_attention(torch.randn(1, 2, 1, 32), keys, values).isfinite().all()
    assert cache.stats().segments > 0
