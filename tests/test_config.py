import dataclasses

import pytest

from mosaickv_hf import MosaicKVCache, MosaicKVConfig


@pytest.mark.parametrize("name", ["default", "paper", "lossless"])
def test_json_round_trip(name):
    config = MosaicKVConfig.preset(name)
    assert MosaicKVConfig.from_json(config.to_json()) == config


def test_paper_preset_is_the_papers():
    config = MosaicKVConfig.preset("paper")
    assert (config.selection, config.group_size, config.rotate) == ("top_r", 1, True)
    assert config.key_bits == config.value_bits == 16
    assert config.key_channel_ratio == config.value_channel_ratio == 0.25
    assert (config.block_index, config.block_size, config.token_ratio) == ("mean", 8, 0.1)
    assert config.segment_length == 65536


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("selection", "random"),
        ("key_bits", 5),
        ("value_bits", "int4"),
        ("value_bits", 16),  # with threshold selection, which quantizes
        ("key_channel_ratio", 0),
        ("value_channel_ratio", 1.5),
        ("token_ratio", -0.1),
        ("token_ratio", "10%"),
        ("key_step", 0.0),
        ("group_size", 0),
        ("group_size", 2.0),
        ("block_size", True),
        ("sink_tokens", -1),
        ("buffer_tokens", 12),  # not whole blocks
        ("rotate", 1),
        ("backend", "cuda"),
        ("block_index", "max"),
    ],
)
def test_a_bad_value_is_named(field, value):
    with pytest.raises(ValueError, match=field) as error:
        dataclasses.replace(MosaicKVConfig(), **{field: value})
    assert repr(value) in str(error.value)


def test_a_wrong_preset_lists_the_right_ones():
    with pytest.raises(ValueError, match="'default', 'paper', 'lossless'"):
        MosaicKVCache("papr")
    with pytest.raises(ValueError, match="compression"):
        MosaicKVCache(0.25)


def test_unknown_json_field():
    with pytest.raises(ValueError, match="chanel_ratio"):
        MosaicKVConfig.from_json('{"chanel_ratio": 0.25}')
    with pytest.raises(ValueError, match="object"):
        MosaicKVConfig.from_json("[]")
