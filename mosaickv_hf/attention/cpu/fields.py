"""What kernels are told: tables of int64 fields (addresses, sizes), their layout, and how they are filled.

The tables of a segment are made once, since its tensors never change.
"""

import weakref

import numpy as np
import torch

from ...compression.packing import codebook
from ...segments import DENSE_TILE, Basis, PackedSegment, PackedStates

# K or V of one source of tokens: packed states, or raw ones as they came.
(
    S_KIND,  # one of the constants below
    S_BITS,  # int64 [heads], of a kept element if S_KIND is QUANTIZED
    S_DENSE,  # dense channels
    S_DENSE_WIDTH,  # the same, rounded up to whole vectors
    S_WIDTH,  # of an unpacked row: dense and sparse channels, each rounded up to whole vectors
    S_BLOCK_SIZE,
    S_NUM_BLOCKS,
    S_DENSE_TABLE,  # see `dense_table`
    S_BITMAP,
    S_BITMAP_BYTES,  # of a row
    S_GROUP_SIZE,
    S_VALUES,
    S_VALUES_END,
    S_OFFSETS,
    S_CODEBOOK,  # fp32 [3, 8]: magnitudes of 4-bit values, their signs apart; signed values of 3 bits; of 2, four twice
    S_HEAD_STRIDE,  # of raw states, in bytes, as the next
    S_ROW_STRIDE,
    S_HEAD_DIM,
    S_BASIS,  # place in the call's list of bases
    STATES_FIELDS,
) = range(20)
QUANTIZED, BF16, FP16, FP32, RAW_BF16, RAW_FP16, RAW_FP32 = 8, 16, 17, 32, 116, 117, 132

# One source of tokens: K's fields, V's fields, and these.
C_K, C_V, C_LENGTH, C_BLOCKS, C_FIRST_TOKEN, C_FIRST_BLOCK, C_MEANS, C_MEAN_SCALE, C_INDEX_CHANNELS, C_MEAN_TILES = (
    0,
    STATES_FIELDS,
    *range(2 * STATES_FIELDS, 2 * STATES_FIELDS + 8),
)
C_SELECTED = 2 * STATES_FIELDS + 8  # its number among the packed sources if blocks were chosen, else -1
SOURCE_FIELDS = 2 * STATES_FIELDS + 9

# A head of `dense_table`: address, bytes of a tile, then per channel where its codes begin in a tile and the `mask` of
# `simd.load8_codes`.
D_ADDRESS, D_TILE_BYTES, D_CHANNELS = range(3)

# A basis, as `Basis`.
(
    B_ROTATION,  # int8
    B_ROTATION_SCALE,
    B_ROTATION_STRIDE,  # elements from row to row, and scales from head to head
    B_OFFSET,
    B_SCALE,
    B_STEP,
    B_DENSE,
    B_DENSE_WIDTH,
    B_HEAD_DIM,
    BASIS_FIELDS,
) = range(10)

# One call.
(
    A_COUNTER,  # next work item of the running phase
    A_WORKERS,  # threads that have joined the running phase
    A_HEADS,
    A_GROUP,
    A_QUERIES,  # tokens
    A_ROWS,  # query rows of a KV head: group * queries
    A_CHUNK,  # query rows of a work item
    A_KEY_DIM,
    A_VALUE_DIM,
    A_QUERY,  # fp32 [heads, rows, key_dim]
    A_SOURCES,  # table [num_sources, SOURCE_FIELDS]
    A_NUM_SOURCES,
    A_KEY_BASES,  # table [num_key_bases, BASIS_FIELDS]
    A_NUM_KEY_BASES,
    A_VALUE_BASES,
    A_NUM_VALUE_BASES,
    A_PREPARED,  # fp32 [num_key_bases, heads, rows, A_PREPARED_WIDTH]: the queries in each basis
    A_PREPARED_WIDTH,
    A_MASK,
    A_MASK_BYTES,  # of an element: 0 no mask, 1 bool, 4 fp32
    A_MASK_HEAD,  # strides in elements
    A_MASK_GROUP,
    A_MASK_QUERY,
    A_SCORES,  # fp32 [heads, group, A_SCORES_WIDTH]
    A_SCORES_WIDTH,
    A_NUM_BLOCKS,  # of all packed sources
    A_RANGES,  # table [num_ranges, 3]: source, first and last block of a range that is scored as one item
    A_NUM_RANGES,
    A_RANGE_SUMS,  # fp32 [num_ranges, heads, group, 2]: the largest score, sum of exp(score - largest)
    A_CHOSEN_COUNT,
    A_CHOSEN,  # int32 [heads, A_CHOSEN_COUNT], blocks numbered over all packed sources, in order
    A_CHOSEN_STARTS,  # int32 [heads, num_selected + 1]: where each packed source's blocks begin
    A_SLOTS,  # table [num_slots, 3]: source, part, parts
    A_NUM_SLOTS,
    A_PARTIALS,  # fp32 [heads, chunks, num_slots, A_PARTIAL_WIDTH]
    A_PARTIAL_WIDTH,
    A_OUTPUT,  # fp32 [heads, rows, value_dim]
    A_SCRATCH,
    A_SCRATCH_BYTES,  # of a thread
    CALL_FIELDS,
) = range(40)

_KINDS = {torch.uint8: QUANTIZED, torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
_RAW_KINDS = {torch.bfloat16: RAW_BF16, torch.float16: RAW_FP16, torch.float32: RAW_FP32}


def whole(n: int) -> int:
    """n rounded up to whole vectors of eight."""
    return -(-n // 8) * 8


class Fields:
    """A table, and the tensors that must live as long as it."""

    def __init__(self, count: int):
        self.table = np.zeros(count, dtype=np.int64)
        self.held: list[torch.Tensor] = []

    def address(self, tensor: torch.Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self.held.append(tensor)
        return tensor.data_ptr()


class SegmentFields(Fields):
    """A packed segment as a source of tokens; `bases` are tables of K's and V's basis."""

    def __init__(self, segment: PackedSegment):
        super().__init__(SOURCE_FIELDS)
        table = self.table
        self._fill(table[C_K : C_K + STATES_FIELDS], segment.keys)
        self._fill(table[C_V : C_V + STATES_FIELDS], segment.values)
        table[C_LENGTH], table[C_BLOCKS], table[C_SELECTED] = segment.length, segment.num_blocks, -1
        if segment.block_means is not None:
            table[C_MEANS] = self.address(segment.block_means)
            table[C_MEAN_SCALE] = self.address(segment.mean_scale)
            table[C_MEAN_TILES], table[C_INDEX_CHANNELS] = segment.block_means.shape[1:3]
        self.bases = tuple(self._basis(states) for states in (segment.keys, segment.values))

    def _fill(self, table: np.ndarray, states: PackedStates) -> None:
        dense = states.num_dense
        tiles = states.num_blocks * -(-states.block_size // DENSE_TILE)
        table[S_DENSE], table[S_DENSE_WIDTH] = dense, whole(dense)
        table[S_WIDTH] = whole(dense) + whole(states.head_dim - dense)
        table[S_KIND], table[S_BITS] = _KINDS[states.values.dtype], self.address(_bits(states.basis))
        table[S_BLOCK_SIZE], table[S_NUM_BLOCKS] = states.block_size, states.num_blocks
        table[S_DENSE_TABLE] = self.address(dense_table(states.basis, self.address(states.dense), tiles))
        table[S_BITMAP], table[S_BITMAP_BYTES] = self.address(states.bitmap), states.bitmap.shape[2]
        table[S_GROUP_SIZE], table[S_HEAD_DIM] = states.group_size, states.head_dim
        table[S_VALUES] = self.address(states.values)
        table[S_VALUES_END] = table[S_VALUES] + states.values.numel() * states.values.element_size()
        table[S_OFFSETS] = self.address(states.offsets)
        four, three, two = (codebook(bits, states.group_size)[:8] for bits in (4, 3, 2))
        table[S_CODEBOOK] = self.address(torch.cat([four, three, two, two]))

    def _basis(self, states: PackedStates) -> np.ndarray:
        basis, head_dim = states.basis, states.head_dim
        dense = states.num_dense
        rotation = [0, 0]
        if basis.rotation is not None:
            # Padding copies, also by nothing.
            parts = [basis.rotation, basis.rotation_scale]
            if head_dim % 8:
                parts = [torch.nn.functional.pad(part, (0, -head_dim % 8)) for part in parts]
            rotation = [self.address(part) for part in parts]
        tensors = [self.address(t) for t in (basis.offset, basis.scale, basis.step)]
        return np.array([*rotation, whole(head_dim), *tensors, dense, whole(dense), head_dim], dtype=np.int64)


def dense_table(basis: Basis, address: int, num_tiles: int) -> torch.Tensor:
    """Where the codes of the dense channels are: int64 `[heads, D_CHANNELS + 2 * num_dense]`.

    Args:
        address: of `PackedStates.dense`.
        num_tiles: tiles of eight tokens of a head.
    """
    rows = []
    for bits in basis.dense_bits:
        tile = sum(bits)
        rows.append([address, tile])
        start = 0
        for width in bits:
            rows[-1] += [start, 0x0101010101010101 * (2**width - 1) - (1 << 64 if width == 8 else 0)]
            start += width
        address += num_tiles * tile
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _bits(basis: Basis) -> torch.Tensor:
    return torch.tensor(basis.bits, dtype=torch.int64, device="cpu")


_segments: weakref.WeakKeyDictionary[PackedSegment, SegmentFields] = weakref.WeakKeyDictionary()


def of_segment(segment: PackedSegment) -> SegmentFields:
    """The tables of a segment, made when first asked for."""
    fields = _segments.get(segment)
    if fields is None:
        fields = _segments[segment] = SegmentFields(segment)
    return fields


class RawFields(Fields):
    """Raw `[num_kv_heads, n, head_dim]` keys and values as a source of tokens, in blocks of eight."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__(SOURCE_FIELDS)
        table, length = self.table, keys.shape[1]
        for first, states in ((C_K, keys), (C_V, values)):
            head_dim = states.shape[2]
            if states.stride(2) != 1 or head_dim % 8:
                states = torch.nn.functional.pad(states, (0, -head_dim % 8)).contiguous()
            self.held.append(states)
            part = table[first : first + STATES_FIELDS]
            part[S_KIND], part[S_WIDTH], part[S_HEAD_DIM] = _RAW_KINDS[states.dtype], whole(head_dim), head_dim
            part[S_BLOCK_SIZE], part[S_NUM_BLOCKS] = 8, -(-length // 8)
            part[S_VALUES] = states.data_ptr()
            part[S_HEAD_STRIDE] = states.stride(0) * states.element_size()
            part[S_ROW_STRIDE] = states.stride(1) * states.element_size()
        table[C_LENGTH], table[C_BLOCKS], table[C_SELECTED] = length, -(-length // 8), -1


_ONES = torch.ones(4096, dtype=torch.float32, device="cpu")


def plain_basis(head_dim: int) -> np.ndarray:
    """The basis of raw states: no rotation, no dense channels, step 1."""
    return np.array([0, 0, 0, 0, 0, _ONES.data_ptr(), 0, 0, head_dim], dtype=np.int64)
