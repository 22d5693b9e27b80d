"""Packed attention against an oracle that rebuilds K and V densely and applies the same selection."""

import dataclasses

import pytest
import torch

from mosaickv_hf import MosaicKVConfig
from mosaickv_hf.attention.reference import attend
from mosaickv_hf.attention.selection import block_scores, choose_blocks, num_chosen_blocks
from mosaickv_hf.layer import _dense_parts
from mosaickv_hf.sequence import SequenceStore

STRATEGIES = {
    "default": {},
    "paper": dataclasses.asdict(MosaicKVConfig.preset("paper")),
    "lossless": dataclasses.asdict(MosaicKVConfig.preset("lossless")),
    "8 and 3 bits": {"key_bits": 8, "value_bits": 3},
    "2 and 3 bits, groups of 2": {"key_bits": 2, "value_bits": 3, "group_size": 2},
    "4 bits, groups of 4, top-r": {
        "key_dense_channels": 20,
        "value_dense_channels": 8,
        "group_size": 4,
        "selection": "top_r",
        "key_channel_ratio": 0.75,
    },
    "K native, V 8 bits": {"selection": "top_r", "key_bits": "native", "value_bits": 8, "key_channel_ratio": 0.8},
    "mean index, unrotated": {"block_index": "mean", "rotate": False, "index_channels": 500},
}


def make(strategy, **changes):
    small = dict(min_length=16, min_segment_length=64, recent_window=5, buffer_tokens=8, min_attended_tokens=16)
    return MosaicKVConfig(**{**STRATEGIES[strategy], **small, **changes})


def make_sequence(config, lengths, heads=2, head_dim=64, dtype=torch.float32, seed=0):
    """A sequence whose segments have these lengths, with some raw tokens around them."""
    generator = torch.Generator().manual_seed(seed)
    sequence = SequenceStore()
    spectrum = torch.linspace(2, 0.2, head_dim)
    for i, length in enumerate(lengths):
        n = length + (config.sink_tokens + config.recent_window if i == 0 else 0)
        keys, values = ((torch.randn(heads, n, head_dim, generator=generator) * spectrum).to(dtype) for _ in "kv")
        sequence.buffer.append(keys, values)
        sequence.pack(length, config)
    return sequence


def oracle(query, sequence, mask, config):
    """Dense softmax attention over the rebuilt tokens, masked to those that are raw or in chosen blocks."""
    keys = torch.cat([part.float() for part in _dense_parts(sequence, "key")], dim=1)
    values = torch.cat([part.float() for part in _dense_parts(sequence, "value")], dim=1)
    attended = torch.ones(query.shape[0], keys.shape[1], dtype=torch.bool)
    sinks = config.sink_tokens
    if query.shape[2] == 1 and sequence.segments:
        packed_mask = None if mask is None else mask[..., sinks : sinks + sequence.packed_length]
        chosen = choose_blocks(query[:, :, 0], sequence.segments, packed_mask, config)
        place = sinks
        for segment, blocks in zip(sequence.segments, chosen or []):
            for head, numbers in enumerate(blocks.tolist()):
                rows = {b * segment.block_size + i for b in numbers if b >= 0 for i in range(segment.block_size)}
                attended[head, place : place + segment.length] = torch.tensor(
                    [row in rows for row in range(segment.length)]
                )
            place += segment.length
    logits = torch.einsum("hgnd,hld->hgnl", query, keys)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    logits = logits.masked_fill(~attended[:, None, None], -torch.inf)
    return torch.einsum("hgnl,hld->hgnd", logits.softmax(-1).nan_to_num(0.0), values)


def check(config, sequence, group, n, mask=None, head_dim=64):
    query = torch.randn(2, group, n, head_dim, generator=torch.Generator().manual_seed(1)) / head_dim**0.5
    got = attend(query, sequence, mask, config)
    # fp32 sums over a few hundred products of size about 1, in two orders and with one rotation between
    torch.testing.assert_close(got, oracle(query, sequence, mask, config), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("lengths", "group"), [((1,), 1), ((7,), 3), ((64, 29), 4), ((131, 64, 8, 3), 8)])
@pytest.mark.parametrize("n", [1, 5])
def test_equals_dense_oracle(strategy, lengths, group, n):
    config = make(strategy)
    check(config, make_sequence(config, lengths), group, n)


@pytest.mark.parametrize("n", [1, 5])
def test_no_raw_tokens(n):
    config = make("paper", sink_tokens=0, recent_window=0, block_size=7, buffer_tokens=7, segment_length=70)
    check(config, make_sequence(config, (70, 35)), 3, n)


def test_mean_index_survives_joining():
    """Parts of a segment whose means differ in scale still score as they did."""
    config = make("paper", min_segment_length=1000)
    sequence = make_sequence(config, (64,))
    generator = torch.Generator().manual_seed(9)
    for scale in (0.1, 20.0):
        sequence.buffer.append(*(scale * torch.randn(2, 64, 64, generator=generator) for _ in "kv"))
        sequence.pack(64, config)
    _, segment = sequence.segments
    keys = list(_dense_parts(sequence, "key"))[2]
    query = torch.randn(2, 3, 64, generator=generator) / 8
    expected = query @ keys.unflatten(1, (-1, 8)).mean(2).transpose(-1, -2)
    error = (block_scores(query, segment, None) - expected).abs()
    # the means are of the raw keys' 32 leading channels, K as packed of a quarter of all elements
    assert error[..., :8].mean() < 1 and error[..., 8:].mean() < 8


@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("strategy", ["default", "paper"])
def test_head_dims(strategy, head_dim):
    config = make(strategy)
    check(config, make_sequence(config, (100, 21), head_dim=head_dim), 3, 1, head_dim=head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["default", "paper", "lossless"])
def test_half_precision_models(strategy, dtype):
    config = make(strategy)
    check(config, make_sequence(config, (45,), dtype=dtype), 2, 1)


@pytest.mark.parametrize("strategy", ["default", "paper"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", ["per head", "shared", "additive", "all masked"])
def test_masks(strategy, n, kind):
    config = make(strategy)
    sequence = make_sequence(config, (77, 30))
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(1 if kind == "shared" else 2, 1, n, sequence.length, generator=generator) > 0.4
    if kind == "additive":
        mask = torch.randn(2, 1, n, sequence.length, generator=generator).masked_fill(~mask, -torch.inf)
    if kind == "all masked":
        mask = torch.zeros_like(mask)
    check(config, sequence, 3, n, mask)


@pytest.mark.parametrize("strategy", ["default", "paper"])
def test_cropped_into_a_segment(strategy):
    config = make(strategy)
    sequence = make_sequence(config, (77, 30))
    sequence.crop(22)
    check(config, sequence, 3, 1)
    sequence.crop(30)
    check(config, sequence, 3, 1)


@pytest.mark.parametrize("strategy", ["default", "paper"])
def test_selection_finds_the_block_that_matters(strategy):
    """A key that stands out is attended, wherever it is and whichever head of the group asks for it."""
    config = make(strategy, token_ratio=0.05)
    for position in (3, 60, 130, 197):
        generator = torch.Generator().manual_seed(position)
        keys = torch.randn(2, 209, 64, generator=generator)
        keys[1, 4 + position] = 0
        keys[1, 4 + position, 7] = 40
        sequence = SequenceStore()
        sequence.buffer.append(keys, torch.randn(2, 209, 64, generator=generator))
        sequence.pack(200, config)
        query = torch.randn(2, 3, 64, generator=generator) / 8
        query[1, 2] = torch.nn.functional.one_hot(torch.tensor(7), 64) * 2.0
        (blocks,) = choose_blocks(query, sequence.segments, None, config)
        assert position // 8 in blocks[1].tolist()
        assert blocks.shape[1] == num_chosen_blocks(200, 25, config) == 2
        seen = torch.ones(1, 1, 1, 200, dtype=torch.bool)
        seen[..., position // 8 * 8 : position // 8 * 8 + 8] = False
        (blocks,) = choose_blocks(query, sequence.segments, seen, config)
        assert position // 8 not in blocks[1].tolist()


def test_scores_estimate_the_largest_logit():
    config = make("default", key_dense_channels=64, key_step=0.01)
    sequence = make_sequence(config, (61,))
    query = torch.randn(2, 3, 64) / 8
    (segment,) = sequence.segments
    keys = list(_dense_parts(sequence, "key"))[1]
    logits = torch.nn.functional.pad(query @ keys.transpose(-1, -2), (0, 3), value=-torch.inf)
    expected = logits.unflatten(-1, (8, 8)).amax(-1)
    torch.testing.assert_close(block_scores(query, segment, None), expected, atol=1e-4, rtol=1e-4)
