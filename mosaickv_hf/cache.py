"""`MosaicKVCache`: what a user passes to `generate(past_key_values=...)`."""

import copy
import os

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from . import saving
from .compression import fit_budget
from .config import MosaicKVConfig
from .layer import MosaicKVLayer, make_reorganizer
from .precision import outside_autocast
from .reorganizer import Reorganizer
from .stats import CacheStats, collect


class MosaicKVCache(Cache):
    """A KV cache that stores K and V compressed along channels and attends to selected blocks of tokens.

    Use it wherever a `DynamicCache` goes; models with SDPA attention (Transformers' default) need no other change:

    ```python
    >>> from mosaickv_hf import MosaicKVCache
    >>> cache = MosaicKVCache()
    >>> output = model.generate(**inputs, past_key_values=cache)
    >>> print(cache.stats())
    ```

    A prompt of `min_segment_length` tokens or more in one call is packed in that call, layer by layer, after exact
    attention. A prompt in chunks (`prefill_chunk_size`) is collected raw and a segment of it closes each time that
    many tokens have come together; the rest, and a shorter prompt, are packed with the first decode step. Generated
    tokens are packed `buffer_tokens` at a time. The first `sink_tokens` and the newest `recent_window` tokens always
    stay raw.

    Args:
        compression (`MosaicKVConfig` or `str`, *optional*): how to compress, or the name of a preset
            (`"default"`, `"paper"`, `"lossless"`, `"raw"`); `"default"` if not given.
        config (`PreTrainedConfig`, *optional*): config of the model. With it, sliding-window and linear-attention
            layers get Transformers' own cache layers, as `DynamicCache(config=...)` gives them.

    Raises:
        ValueError: `compression` is neither a config nor the name of a preset.
    """

    def __init__(self, compression: MosaicKVConfig | str | None = None, *, config: PreTrainedConfig | None = None):
        if not isinstance(compression, MosaicKVConfig):
            compression = MosaicKVConfig.preset("default" if compression is None else compression)
        self.compression = compression
        self._reorganizer = make_reorganizer(compression)
        if config is None:
            super().__init__(layer_class_to_replicate=_LayerFactory(compression, self._reorganizer))
        else:
            layers = DynamicCache(config=config).layers
            super().__init__(
                layers=[
                    MosaicKVLayer(compression, i, self._reorganizer) if type(layer) is DynamicLayer else layer
                    for i, layer in enumerate(layers)
                ]
            )

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache; `len` would say otherwise

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={len(self.layers)}, seq_length={self.get_seq_length()})"

    @classmethod
    def from_cache(
        cls,
        cache: Cache,
        attention_mask: torch.Tensor | None = None,
        compression: MosaicKVConfig | str | None = None,
    ) -> "MosaicKVCache":
        """Compresses a filled cache, so that one prefill serves several methods. `cache` stays as it is.

        Args:
            cache: a `DynamicCache` that holds a prompt; better, a `MosaicKVCache("raw")`, which has also seen what the
                prompt's end attends to (`MosaicKVConfig.adapt_steps`).
            attention_mask: `[batch_size, length]` as given to the model; 0 marks left padding, which is not stored.
                None if there is none; a `MosaicKVCache` knows.
            compression: as for `MosaicKVCache`.

        Raises:
            ValueError: `attention_mask` does not fit the cache, or a layer's K and V are not held as tensors, or are
                packed already.
        """
        result = cls(compression)
        layers = []
        for i, layer in enumerate(cache.layers):
            if not isinstance(layer, MosaicKVLayer) and type(layer) is not DynamicLayer:
                if not hasattr(layer, "keys"):
                    raise ValueError(f"`cache` must be a DynamicCache, got a {type(layer).__name__} as layer {i}")
                layers.append(copy.deepcopy(layer))
                continue
            layers.append(MosaicKVLayer(result.compression, i, result._reorganizer))
            if layer.get_seq_length():
                layers[-1].fill(*_raw_states(layer, attention_mask))
        result.layers = layers
        result.layer_class_to_replicate = None if layers else result.layer_class_to_replicate
        result._fit_budget()
        return result

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Takes new tokens' K and V, as `DynamicCache.update` does."""
        # A long chunk may be followed by more of the prompt. At the first layer all of them hold the same tokens.
        if self.compression.memory_budget is not None and key_states.shape[2] <= self.compression.recent_window:
            if self._mosaic_layers()[:1] == self.layers[layer_idx : layer_idx + 1]:
                self._fit_budget()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def to_dynamic_cache(self) -> DynamicCache:
        """A `DynamicCache` with the same tokens, as far as they are still raw; packed ones as they are decoded."""
        result = DynamicCache()
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, MosaicKVLayer):
                raise ValueError(f"only attention over all tokens goes into a DynamicCache, layer {i} is another")
            if layer.get_seq_length():
                result.update(layer.materialize("key"), layer.materialize("value"), i)
        return result

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens, as `DynamicCache.crop` does; packed ones too.

        Raises:
            ValueError: `tokens_to_remove` is positive where `DynamicCache` refuses that, or removes more tokens than
                there are. The cache is then as it was.
        """
        for layer in self._mosaic_layers():
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        *,
        model: PreTrainedModel | PreTrainedConfig | None = None,
        input_ids: torch.Tensor | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Writes the cache into a folder, for `from_pretrained`. A cache that is there already stays until it is done.

        Args:
            save_directory: is made if it is not there.
            model (*optional*): whose K and V these are; then `from_pretrained` can tell another model.
            input_ids (*optional*): the tokens, so that `from_pretrained` can tell others.
            max_shard_size: bytes of a file, or text such as `"5GB"`.

        Raises:
            ValueError: a layer is not one of ours (sliding windows, linear attention).
        """
        saving.save(
            self.layers,
            self.compression,
            save_directory,
            model=model,
            input_ids=input_ids,
            max_shard_size=max_shard_size,
        )

    @classmethod
    def from_pretrained(
        cls,
        save_directory: str | os.PathLike,
        *,
        device: torch.device | str | None = None,
        model: PreTrainedModel | PreTrainedConfig | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> "MosaicKVCache":
        """Reads a cache that `save_pretrained` wrote; decoding goes on as it would have.

        Args:
            device: where its tensors shall be; the CPU if not given.
            model, input_ids (*optional*): are compared with those it was saved with, if any.

        Raises:
            OSError: there is no such cache, or a file of it is missing.
            ValueError: a file is damaged or is something else, or the model or tokens are others.
        """
        compression, layers, reorganizer = saving.load(save_directory, device=device, model=model, input_ids=input_ids)
        result = cls(compression)
        result.layers, result._reorganizer = layers, reorganizer
        result.layer_class_to_replicate = None if layers else result.layer_class_to_replicate
        return result

    def stats(self) -> CacheStats:
        """What the cache holds now: tokens, measured bytes by kind, segments, dense materializations."""
        return collect(self.layers, self._reorganizer)

    @torch.compiler.disable
    @outside_autocast
    def _fit_budget(self) -> None:
        """Packs what waits for `memory_budget` to be fitted, in all layers; a row when it waits in all of them."""
        layers = self._mosaic_layers()
        waiting = [layer.waiting() for layer in layers]
        for row in {row for prompts in waiting for row in prompts}:
            packed = [layer.rows[row].packed_length if layer.is_initialized else 0 for layer in layers]
            # A layer that holds more of the row has packed it already, before an error in another one.
            if not all(row in prompts or length > min(packed) for prompts, length in zip(waiting, packed)):
                for prompts in waiting:
                    prompts.pop(row, None)
        sequences = [prompts for rows in waiting for prompts in rows.values()]
        if not sequences:
            return
        fitted = fit_budget(sequences, self.compression)
        del sequences
        for layer in layers:
            # Its raw tokens are freed before the next layer's turn.
            bases = {row: [fitted(prompt) for prompt in prompts] for row, prompts in waiting.pop(0).items()}
            layer.pack_waiting(bases)

    def _mosaic_layers(self) -> list[MosaicKVLayer]:
        return [layer for layer in self.layers if isinstance(layer, MosaicKVLayer)]


class _LayerFactory:
    """Makes the layers of a cache one by one. It knows no cache: in a cycle a dropped one would keep its thread."""

    def __init__(self, compression: MosaicKVConfig, reorganizer: Reorganizer):
        self._compression, self._reorganizer, self._made = compression, reorganizer, 0

    def __call__(self) -> MosaicKVLayer:
        self._made += 1
        return MosaicKVLayer(self._compression, self._made - 1, self._reorganizer)


def _raw_states(layer: MosaicKVLayer | DynamicLayer, attention_mask: torch.Tensor | None) -> tuple:
    """The arguments of `MosaicKVLayer.fill` from a layer that holds raw tokens."""
    if isinstance(layer, DynamicLayer):
        return layer.keys, layer.values, _padding(attention_mask, layer.keys.shape[0], layer.keys.shape[2])
    if any(row.segments for row in layer.rows):
        raise ValueError(f"`cache` must be a DynamicCache or hold raw tokens only, layer {layer.index} has packed ones")
    return layer.materialize("key"), layer.materialize("value"), layer.starts, layer.queries


def _padding(attention_mask: torch.Tensor | None, batch: int, length: int) -> list[int | None]:
    """Per row, the position of its first real token; None for a row of padding only."""
    if attention_mask is None:
        return [0] * batch
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(f"`attention_mask` must have the cache's shape {[batch, length]}, got {attention_mask.shape}")
    real = attention_mask.bool()
    return [int(row.to(torch.uint8).argmax()) if row.any() else None for row in real]
