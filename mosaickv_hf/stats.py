"""What a cache holds, measured on its tensors."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin

from .layer import MosaicKVLayer
from .reorganizer import Reorganizer
from .segments import PackedSegment, PackedStates, weighted_mean

KINDS = ("values", "bitmaps", "rotations", "index", "raw", "open")


@dataclass(frozen=True)
class StatesStats:
    """How K or V of a segment is packed.

    Attributes:
        bits_per_element: per KV head, bits that an element takes, dense channels and bitmap included, bases not.
        steps: per KV head, quantization step; 1 where elements are not quantized.
        bits: per KV head, bits of a kept element.
        loss: squared error that packing made relative to energy, on a sample of the tokens.
    """

    bits_per_element: tuple[float, ...]
    steps: tuple[float, ...]
    bits: tuple[int, ...]
    loss: float


@dataclass(frozen=True)
class SegmentStats:
    """A packed segment.

    Attributes:
        layer, row: where it is; a segment that rows share is told for the first of them.
        start: position of its first token, padding included.
        length: tokens.
        keys, values: how they are packed.
    """

    layer: int
    row: int
    start: int
    length: int
    keys: StatesStats
    values: StatesStats


@dataclass(frozen=True)
class CacheStats:
    """Measured state of a `MosaicKVCache`; prints as a table.

    Attributes:
        tokens: logical length of the sequences, padding included.
        bytes_by_kind: bytes held by "values" (dense channels and kept elements), "bitmaps", "rotations" (with scales
            and steps), "index" (block offsets and block means), "raw" (sinks, buffers with their room to grow, the
            newest queries, and Transformers' own layers) and "open" (generated tokens that are kept raw beside their
            packed form until it is reorganized). Memory that rows share counts once.
        bytes_bf16: bytes of the same K and V, padding left out, as bf16 for every row, as `DynamicCache` holds them.
        strategies: of every packed segment, layer by layer: what was chosen for it, and what is lost.
        swaps: segments that have been replaced by a reorganized form.
        waits, wait_seconds: times that such a form was due and not ready, and how long that took, in seconds.
        dense_materializations: times that K or V was expanded for an operation the cache does not know.
    """

    tokens: int
    bytes_by_kind: dict[str, int]
    bytes_bf16: int
    strategies: tuple[SegmentStats, ...]
    swaps: int
    waits: int
    wait_seconds: float
    dense_materializations: int

    @property
    def segments(self) -> int:
        """Packed segments over all layers; shared ones count once."""
        return len(self.strategies)

    def losses(self) -> dict[int, tuple[float, float]]:
        """By layer, the mean loss of K and of V over its packed tokens."""
        found = {}
        for layer in sorted({segment.layer for segment in self.strategies}):
            own = [segment for segment in self.strategies if segment.layer == layer]
            lengths = [segment.length for segment in own]
            parts = ([segment.keys.loss for segment in own], [segment.values.loss for segment in own])
            found[layer] = tuple(weighted_mean(losses, lengths) for losses in parts)
        return found

    @property
    def bytes(self) -> int:
        """All bytes held."""
        return sum(self.bytes_by_kind.values())

    @property
    def ratio(self) -> float:
        """`bytes_bf16 / bytes`; 0 when the cache is empty."""
        return self.bytes_bf16 / self.bytes if self.bytes else 0.0

    @property
    def ratio_without_open(self) -> float:
        """`ratio` without the raw tokens of open segments, whose number does not grow with the context."""
        held = self.bytes - self.bytes_by_kind["open"]
        return self.bytes_bf16 / held if held else 0.0

    def __str__(self) -> str:
        lines = [f"{'tokens':<24}{self.tokens:>14,}", f"{'segments':<24}{self.segments:>14,}"]
        lines += [f"{'swaps':<24}{self.swaps:>14,}", f"{'waits':<24}{self.waits:>14,}"]
        lines += [f"{'wait seconds':<24}{self.wait_seconds:>14.3f}"]
        lines += [f"{kind + ' bytes':<24}{count:>14,}" for kind, count in self.bytes_by_kind.items()]
        lines += [f"{'bytes':<24}{self.bytes:>14,}", f"{'bytes as bf16':<24}{self.bytes_bf16:>14,}"]
        lines += [f"{'ratio':<24}{self.ratio:>14.2f}", f"{'ratio without open':<24}{self.ratio_without_open:>14.2f}"]
        lines += [f"{'dense materializations':<24}{self.dense_materializations:>14,}"]
        return "\n".join(lines)


def collect(layers: Iterable[CacheLayerMixin], reorganizer: Reorganizer) -> CacheStats:
    """Measures the layers of a cache, and its reorganizer."""
    held: dict[int, tuple[str, int]] = {}
    tokens = bf16 = materializations = swaps = 0
    strategies: dict[int, SegmentStats] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, MosaicKVLayer):
            layer.settle()
        for kind, tensor in _tensors(layer):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                held.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
        if isinstance(layer, MosaicKVLayer):
            layer.settle()
            tokens = max(tokens, layer.get_seq_length())
            materializations += layer.materializations
            swaps += layer.swaps
            for row, sequence in enumerate(layer.rows):
                sinks = 0 if sequence.sinks is None else sequence.sinks[0].shape[1]
                position = (layer.starts[row] or 0) + sinks
                for segment in sequence.segments:
                    strategies.setdefault(id(segment), _strategy(segment, i, row, position))
                    position += segment.length
            if layer.is_initialized:
                per_token = layer.num_key_value_heads * (layer.key_head_dim + layer.value_head_dim) * 2
                bf16 += sum(row.length for row in layer.rows) * per_token
        elif isinstance(layer, CacheLayerMixin) and layer.is_initialized:
            tokens = max(tokens, layer.get_seq_length())
            bf16 += (layer.keys.numel() + layer.values.numel()) * 2
    counts = Counter({kind: 0 for kind in KINDS})
    for kind, size in held.values():
        counts[kind] += size
    return CacheStats(
        tokens=tokens,
        bytes_by_kind=dict(counts),
        bytes_bf16=bf16,
        strategies=tuple(strategies.values()),
        swaps=swaps,
        waits=reorganizer.waits,
        wait_seconds=reorganizer.wait_seconds,
        dense_materializations=materializations,
    )


def _strategy(segment: PackedSegment, layer: int, row: int, start: int) -> SegmentStats:
    parts = [_states(states, loss) for states, loss in zip((segment.keys, segment.values), segment.losses)]
    return SegmentStats(layer, row, start, segment.length, *parts)


def _states(states: PackedStates, loss: float) -> StatesStats:
    rows, basis = states.bitmap.shape[1], states.basis
    bitmap = states.bitmap[0].nbytes
    taken = [
        8 * (bitmap + dense + units * states.values.itemsize) / (rows * states.head_dim)
        for dense, units in zip(states.head_dense_bytes(), states.head_units())
    ]
    return StatesStats(tuple(taken), tuple(basis.step.tolist()), basis.bits, loss)


def _tensors(layer: CacheLayerMixin) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(layer, MosaicKVLayer):
        for states in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if states is not None:
                yield "raw", states
        return
    if layer.queries is not None:
        yield "raw", layer.queries
    for row in layer.rows:
        for segment in row.segments:
            yield from segment.tensors()
        for states in (*(row.sinks or ()), *row.buffer.tensors()):
            yield "raw", states
        for waiting in (*row.closed, *([] if row.open is None else [row.open])):
            for tensor in waiting.tensors():
                yield "open", tensor
