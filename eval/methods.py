"""The caches that are compared, each made from one prefill."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import QuantizedCache

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

from .baselines.quest import QuestCache
from .baselines.think import QUERY_WINDOW, ThinkCache
from .errors import EvalError

PRESETS = ("default", "paper", "lossless")
NAMES = ("full", *PRESETS, "quantized", "quest", "think")


@dataclass(frozen=True)
class Prefill:
    """A batch of prompts that the model has read.

    Attributes:
        cache: holds them raw.
        config: of the model.
    """

    cache: MosaicKVCache
    config: PreTrainedConfig


def prefill_cache() -> MosaicKVCache:
    """The cache to read prompts with: raw, and with as many of the newest queries as any method looks at."""
    return MosaicKVCache(dataclasses.replace(MosaicKVConfig.preset("raw"), query_window=QUERY_WINDOW))


def make_methods(names: list[str]) -> dict[str, Callable[[Prefill], Cache]]:
    """By name, what makes the method's cache of a prefill.

    Args:
        names: of `NAMES`, or the path of a `MosaicKVConfig` as JSON, which is named after its file.

    Raises:
        EvalError: an unknown name, a file that is no config, or one that is named as another method.
    """
    mosaic = {name: _mosaic(MosaicKVConfig.from_dict(fields)) for name, fields in configs(names).items()}
    return {_label(name): mosaic.get(_label(name)) or _OTHERS[name] for name in names}


def configs(names: list[str]) -> dict[str, dict]:
    """The fields of the configs among these methods, by the method's name; raises as `make_methods`."""
    found = {}
    labels = [_label(name) for name in names]
    for name, label in zip(names, labels):
        if name.endswith(".json") and (label in NAMES or labels.count(label) > 1):
            raise EvalError(f"the config {name} would be named {label!r}, as another method is; rename the file")
        if name == "quantized" and importlib.util.find_spec("optimum") is None:
            raise EvalError("method 'quantized' needs optimum-quanto; pip install '.[eval]', or leave it out")
        if name in PRESETS:
            found[name] = MosaicKVConfig.preset(name).to_dict()
        elif name.endswith(".json"):
            found[_label(name)] = _config(name).to_dict()
        elif name not in _OTHERS:
            raise EvalError(f"unknown method {name!r}; there are {', '.join(NAMES)}, and .json files of a config")
    return found


def _label(name: str) -> str:
    return Path(name).stem if name.endswith(".json") else name


def _config(path: str) -> MosaicKVConfig:
    try:
        return MosaicKVConfig.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EvalError(f"cannot read the config {path}: {error.strerror}") from None
    except (ValueError, json.JSONDecodeError) as error:
        raise EvalError(f"{path} is not a MosaicKVConfig: {error}") from None


def _mosaic(config: MosaicKVConfig) -> Callable[[Prefill], Cache]:
    return lambda prefill: MosaicKVCache.from_cache(prefill.cache, compression=config)


def _full(prefill: Prefill) -> Cache:
    return prefill.cache.to_dynamic_cache()


def _quantized(prefill: Prefill) -> Cache:
    """Transformers' own, int4 by quanto, the newest 128 tokens of what is generated whole."""
    cache = QuantizedCache("quanto", prefill.config)
    for i, layer in enumerate(_full(prefill).layers):
        cache.update(layer.keys, layer.values, i)
    return cache


def _quest(prefill: Prefill) -> Cache:
    return QuestCache(_full(prefill))


def _think(prefill: Prefill) -> Cache:
    return ThinkCache(_full(prefill), [layer.queries for layer in prefill.cache.layers])


_OTHERS = {"full": _full, "quantized": _quantized, "quest": _quest, "think": _think}


def bytes_per_token(cache: Cache, mask: torch.Tensor) -> float:
    """Bytes that a cache holds a real token of the batch, by the `[batch, length]` mask of its prompts.

    Padding is not held against the caches that store it: they share their bytes out over it.
    """
    return held_bytes(cache) / int(mask.sum() if isinstance(cache, MosaicKVCache) else mask.numel())


def held_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds.

    Other caches than ours are given that a float32 model's K and V would be bf16 in use: their float32 elements count
    two bytes. ThinK's `_expanded` repeats what it holds.
    """
    if isinstance(cache, MosaicKVCache):
        return cache.stats().bytes
    held = [{k: v for k, v in vars(layer).items() if k != "_expanded"} for layer in cache.layers]
    tensors = {id(tensor): tensor for tensor in _tensors(held)}
    return sum(t.numel() * (2 if t.dtype == torch.float32 else t.itemsize) for t in tensors.values())


def _tensors(held) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        if hasattr(held, "__tensor_flatten__"):  # a quantized tensor: its parts
            for name in held.__tensor_flatten__()[0]:
                yield from _tensors(getattr(held, name))
        elif held.numel():
            yield held
    elif isinstance(held, dict):
        for part in held.values():
            yield from _tensors(part)
    elif isinstance(held, (list, tuple)):
        for part in held:
            yield from _tensors(part)
