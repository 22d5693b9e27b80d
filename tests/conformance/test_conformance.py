"""Every kind of model x what is done with a cache x preset. `docs/compatibility.md` is the table of these tests."""

import dataclasses
import functools
import os

import pytest
import torch
from conftest import CACHE
from features import FEATURES
from table import DOCUMENT, render
from transformers import DynamicCache
from zoo import REFUSED, ZOO, make

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

# Small enough that prompts of a hundred tokens are packed, and decoding packs some more.
_SMALL = dict(min_length=16, min_segment_length=48, recent_window=9, buffer_tokens=8, sink_tokens=3)
_FEW = dict(min_attended_tokens=16, token_ratio=0.3)
PRESETS = {
    "lossless": dataclasses.replace(MosaicKVConfig.preset("lossless"), **_SMALL),
    "default": dataclasses.replace(MosaicKVConfig.preset("default"), **_SMALL, **_FEW, key_dense_channels=4),
    "paper": dataclasses.replace(MosaicKVConfig.preset("paper"), **_SMALL, **_FEW, reorganize="sync"),
}
NEWEST = CACHE == "cache"

model_of = functools.cache(make)


@functools.cache
def dynamic(name: str, feature: str):
    """What comes out with `DynamicCache`, or what is raised."""
    model = model_of(name)
    try:
        return FEATURES[feature](model, DynamicCache(config=model.config))
    except Exception as error:
        return error


def mosaic(name: str, preset: str, **changes) -> MosaicKVCache:
    return MosaicKVCache(dataclasses.replace(PRESETS[preset], **changes), config=model_of(name).config)


def cells():
    number = 0
    for name in ZOO:
        for feature in FEATURES:
            for preset in PRESETS:
                # The sample that the oldest Transformers runs, and of lossy presets a third unless all are asked for.
                lossy = preset != "lossless"
                number += lossy
                if lossy and number % 3 and not os.environ.get("MOSAICKV_CONFORMANCE"):
                    continue
                marks = [pytest.mark.slow] if lossy else []
                yield pytest.param(name, feature, preset, marks=marks, id=f"{name}-{feature}-{preset}")


@pytest.mark.parametrize("name, feature, preset", cells())
def test_cell(name, feature, preset):
    """Lossless gives DynamicCache's tokens, a lossy preset those of its plain torch oracle."""
    model, run, theirs = model_of(name), FEATURES[feature], dynamic(name, feature)
    if (name, feature) in REFUSED:
        assert isinstance(theirs, Exception)
        with pytest.raises(type(theirs)):
            run(model, mosaic(name, preset))
        return
    if isinstance(theirs, Exception):
        assert not NEWEST, f"DynamicCache: {theirs!r}"
        pytest.skip(f"DynamicCache of this Transformers: {theirs!r}")
    cache = mosaic(name, preset)
    ours = run(model, cache)
    expected = theirs if preset == "lossless" else run(model, mosaic(name, preset, backend="torch"))
    assert torch.equal(ours, expected)
    assert cache.stats().segments > 0 and cache.stats().dense_materializations == 0


def test_the_document_is_this_table():
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "python tests/conformance/table.py writes it"
