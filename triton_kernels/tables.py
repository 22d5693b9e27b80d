"""What kernels are told of segments: one table of addresses and sizes, so that one launch serves several segments.

A table is made when a segment is new, never in a decode step that finds the segments as they were.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from ..segments import DENSE_TILE, Basis, PackedSegment, PackedStates
from .bits import BF16, FP16, FP32, QUANTIZED

# A segment: K's fields, V's fields, and these; of int64.
STATES_FIELDS = 6
DENSE, DENSE_TABLE, BITMAP, VALUES, OFFSETS, BITS = range(STATES_FIELDS)
NUM_BLOCKS, LENGTH, FIRST_BLOCK, FIRST_TOKEN, MEANS = range(2 * STATES_FIELDS, 2 * STATES_FIELDS + 5)
FIELDS = 2 * STATES_FIELDS + 5

_KINDS = {torch.uint8: QUANTIZED, torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32}


@dataclass(frozen=True)
class StatesShape:
    """Sizes of K or V of a segment that kernels are compiled for; `bits.sparse_values` tells of most.

    Attributes:
        num_dense, num_sparse: channels.
    """

    num_dense: int
    num_sparse: int
    row_bytes: int
    group_size: int
    kind: int
    words: int
    fixed: int

    @property
    def dense_padded(self) -> int:
        """A power of two, and what a matrix product takes at least."""
        return max(16, triton.next_power_of_2(self.num_dense)) if self.num_dense else 0

    @property
    def bytes_padded(self) -> int:
        return max(triton.next_power_of_2(self.row_bytes), -(-16 // (8 * self.group_size))) if self.row_bytes else 0

    @classmethod
    def of(cls, states: PackedStates) -> "StatesShape":
        sparse, kind = states.head_dim - states.num_dense, _KINDS[states.values.dtype]
        row_bytes, group_size = states.bitmap.shape[2], states.group_size
        fixed = 0
        if kind == QUANTIZED:
            words = -(-sparse * max(states.basis.bits) // 32) + 1
        else:
            words = sparse
            # If elements are chosen by rank all rows are as long, but for padding at the end.
            units = (states.offsets[:, 1:] - states.offsets[:, :-1]).unique().tolist()
            if len(units) == 1 and units[0] and units[0] % states.block_size == 0:
                words = fixed = units[0] // states.block_size
        return cls(states.num_dense, sparse, row_bytes, group_size, kind, triton.next_power_of_2(max(words, 1)), fixed)


def dense_table(basis: Basis, num_tiles: int) -> torch.Tensor:
    """int64 `[num_kv_heads, 2 + 2 * num_dense]`: where a head's codes begin, bytes of a tile, then per dense channel
    where its codes begin in a tile, and their widths."""
    rows, base = [], 0
    for widths in basis.dense_bits:
        starts = [sum(widths[:c]) for c in range(len(widths))]
        rows.append([base, sum(widths), *starts, *widths])
        base += num_tiles * sum(widths)
    return torch.tensor(rows, dtype=torch.int64, device=basis.step.device)


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """One segment's row of a table, and the tensors whose addresses stand in it."""

    row: list[int]
    held: list[torch.Tensor]
    keys: StatesShape
    values: StatesShape

    @classmethod
    def of(cls, segment: PackedSegment) -> "SegmentTable":
        row, held = [0] * FIELDS, []
        for first, states in ((0, segment.keys), (STATES_FIELDS, segment.values)):
            tiles = states.num_blocks * -(-states.block_size // DENSE_TILE)
            tensors = {
                DENSE: states.dense,
                DENSE_TABLE: dense_table(states.basis, tiles),
                BITMAP: states.bitmap,
                VALUES: states.values,
                OFFSETS: states.offsets,
                BITS: torch.tensor(states.basis.bits, dtype=torch.int32, device=states.offsets.device),
            }
            for field, tensor in tensors.items():
                # Words are read at addresses that are multiples of their size.
                tensor = tensor.contiguous()
                tensor = tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
                held.append(tensor)
                row[first + field] = tensor.data_ptr()
        row[NUM_BLOCKS] = segment.keys.num_blocks
        if segment.block_means is not None:
            held.append(segment.block_means.contiguous())
            row[MEANS] = held[-1].data_ptr()
        return cls(row, held, StatesShape.of(segment.keys), StatesShape.of(segment.values))


_tables: weakref.WeakKeyDictionary[PackedSegment, SegmentTable] = weakref.WeakKeyDictionary()


class Table:
    """Several segments of one sequence.

    Attributes:
        rows: int64 `[num_segments, FIELDS]` on their device.
        keys, values: the shapes that fit all of them.
        first_blocks: int32 `[num_segments + 1]`, blocks before each, and all.
        num_blocks, most_blocks: of all segments, and of the longest.
    """

    def __init__(self, segments: Sequence[PackedSegment]):
        tables = []
        for segment in segments:
            if segment not in _tables:
                _tables[segment] = SegmentTable.of(segment)
            tables.append(_tables[segment])
        self._held = tables
        device = segments[0].keys.offsets.device
        rows, firsts, token = [], [0], 0
        for segment, table in zip(segments, tables):
            row = list(table.row)
            row[LENGTH], row[FIRST_BLOCK], row[FIRST_TOKEN] = segment.length, firsts[-1], token
            rows.append(row)
            firsts.append(firsts[-1] + segment.num_blocks)
            token += segment.length
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.first_blocks = torch.tensor(firsts, dtype=torch.int32, device=device)
        self.num_blocks, self.most_blocks = firsts[-1], max(segment.num_blocks for segment in segments)
        self.keys, self.values = _common([t.keys for t in tables]), _common([t.values for t in tables])


def _common(shapes: list[StatesShape]) -> StatesShape:
    fixed = shapes[0].fixed if len({shape.fixed for shape in shapes}) == 1 else 0
    words = max(shape.words for shape in shapes)
    if shapes[0].kind != QUANTIZED and not fixed:
        words = triton.next_power_of_2(shapes[0].num_sparse)
    return dataclasses.replace(shapes[0], words=words, fixed=fixed)
