"""Unpacking: eight tokens of a source at a time, as rows of fp32 in a buffer that stays in the first-level cache.

A row holds the dense channels' codes, then the sparse channels in steps, each part rounded up to whole vectors with
zeros; what a code and a step are worth is folded into the query and into the output.
"""

import numpy as np
from numba import njit

from .fields import (
    BF16,
    D_ADDRESS,
    D_CHANNELS,
    D_TILE_BYTES,
    FP16,
    FP32,
    QUANTIZED,
    RAW_BF16,
    RAW_FP32,
    S_BITMAP,
    S_BITMAP_BYTES,
    S_BITS,
    S_BLOCK_SIZE,
    S_CODEBOOK,
    S_DENSE,
    S_DENSE_TABLE,
    S_DENSE_WIDTH,
    S_GROUP_SIZE,
    S_HEAD_DIM,
    S_HEAD_STRIDE,
    S_KIND,
    S_NUM_BLOCKS,
    S_OFFSETS,
    S_ROW_STRIDE,
    S_VALUES,
    S_VALUES_END,
)
from .simd import (
    RANKS,
    get,
    load8,
    load8_bf16,
    load8_codes,
    load8_f16,
    load8_i8,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
    popcount,
    prefetch,
    splat,
    spread,
    spread2,
    spread3,
    spread4,
    store8,
    store_u8,
    transpose,
)


def _spreads() -> np.ndarray:
    """`[4, 256]` uint8: bitmap bits of groups of 1, 2, 4 and 8 channels to a bit per channel of one byte."""
    table = np.zeros((4, 256), dtype=np.uint8)
    for i in range(4):
        for bits in range(256):
            table[i, bits] = sum(((bits >> (channel >> i)) & 1) << channel for channel in range(8))
    return table


_SPREADS = _spreads()
# A row is read in whole vectors, so up to this far past its last element.
READ_AHEAD = 64


@njit(forceinline=True)
def dense_head(states, head):
    """Address of a head's row of `fields.dense_table`."""
    return get(states, S_DENSE_TABLE) + 8 * head * (D_CHANNELS + 2 * get(states, S_DENSE))


@njit(forceinline=True)
def dense_tile(states, table, block, first):
    """Address of the codes of eight tokens of a block, from token `first` on; `table` is from `dense_head`."""
    tile = block * ((get(states, S_BLOCK_SIZE) + 7) >> 3) + (first >> 3)
    return get(table, D_ADDRESS) + tile * get(table, D_TILE_BYTES)


@njit
def dense_lanes(states, head, block, first, out):
    """Codes of the dense channels of eight tokens of a block, from token `first` on: `[S_DENSE_WIDTH, 8]` at out."""
    table, dense = dense_head(states, head), get(states, S_DENSE)
    tile = dense_tile(states, table, block, first)
    channels = table + 8 * D_CHANNELS
    for c in range(dense):
        store8(out + 32 * c, load8_codes(tile + get(channels, 2 * c), get(channels, 2 * c + 1)))
    for c in range(dense, get(states, S_DENSE_WIDTH)):
        store8(out + 32 * c, splat(0.0))


@njit
def _channel_bitmap(bitmap, group_size, channels, out):
    """A row's bitmap of groups of channels to one of channels, at `out`."""
    if group_size == 2 or group_size == 4 or group_size == 8:
        shift = popcount(group_size - 1)
        spreads, bits = _SPREADS.ctypes.data + 256 * shift, 8 >> shift
        for byte in range((channels + 7) >> 3):
            first = byte * bits
            groups = (load_u8(bitmap + (first >> 3)) >> (first & 7)) & ((1 << bits) - 1)
            store_u8(out + byte, load_u8(spreads + groups))
        return
    for byte in range((channels + 7) >> 3):
        kept = 0
        for lane in range(min(8, channels - 8 * byte)):
            group = (8 * byte + lane) // group_size
            kept |= ((load_u8(bitmap + (group >> 3)) >> (group & 7)) & 1) << lane
        store_u8(out + byte, kept)


@njit(forceinline=True)
def _element_kind(states, head):
    """What an element of a head is: one of the kinds, or the bits of a quantized one."""
    kind = get(states, S_KIND)
    return get(get(states, S_BITS), head) if kind == QUANTIZED else kind


@njit(forceinline=True)
def _row_units(bitmap, num_bytes, group_size, kind):
    """Units of `values` that a row takes."""
    count = 0
    for byte in range(num_bytes):
        count += popcount(load_u8(bitmap + byte))
    count *= group_size
    return (count * kind + 7) >> 3 if kind <= 4 else count


@njit(forceinline=True)
def _unit_bytes(kind):
    if kind == FP32:
        return 4
    return 2 if kind == BF16 or kind == FP16 else 1


def _row_kernel(fetch):
    """A function that unpacks the sparse channels of one row, with `fetch` for the kind of its elements."""

    @njit
    def unpack(bitmap, vectors, values, codebook, out):
        rank = 0
        ranks = RANKS.ctypes.data
        for byte in range(vectors):
            kept = load_u8(bitmap + byte)
            store8(out + 32 * byte, fetch(values, rank, ranks + 32 * kept, codebook))
            rank += popcount(kept)
        return rank

    return unpack


@njit(forceinline=True)
def _fetch_fp32(values, rank, ranks, codebook):
    return spread(load8(values + 4 * rank), ranks)


@njit(forceinline=True)
def _fetch_bf16(values, rank, ranks, codebook):
    return spread(load8_bf16(values + 2 * rank), ranks)


@njit(forceinline=True)
def _fetch_fp16(values, rank, ranks, codebook):
    return spread(load8_f16(values + 2 * rank), ranks)


@njit(forceinline=True)
def _fetch_i8(values, rank, ranks, codebook):
    return spread(load8_i8(values + rank), ranks)


@njit(forceinline=True)
def _fetch_4(values, rank, ranks, codebook):
    return spread4(load_i64(values + (rank >> 1)) >> (4 * (rank & 1)), ranks, load8(codebook))


@njit(forceinline=True)
def _fetch_3(values, rank, ranks, codebook):
    bit = 3 * rank
    return spread3(load_u32(values + (bit >> 3)) >> (bit & 7), ranks, load8(codebook))


@njit(forceinline=True)
def _fetch_2(values, rank, ranks, codebook):
    return spread2(load_u32(values + (rank >> 2)) >> (2 * (rank & 3)), ranks, load8(codebook))


_row_fp32, _row_bf16, _row_fp16 = _row_kernel(_fetch_fp32), _row_kernel(_fetch_bf16), _row_kernel(_fetch_fp16)
_row_i8, _row_4 = _row_kernel(_fetch_i8), _row_kernel(_fetch_4)
_row_3, _row_2 = _row_kernel(_fetch_3), _row_kernel(_fetch_2)


@njit
def _sparse_rows(states, head, block, first, out, stride, spare):
    """The sparse channels of eight tokens, rows `stride` bytes apart; tokens past the block are zero."""
    kind, size, group_size = _element_kind(states, head), get(states, S_BLOCK_SIZE), get(states, S_GROUP_SIZE)
    channels = get(states, S_HEAD_DIM) - get(states, S_DENSE)
    num_bytes, num_blocks = get(states, S_BITMAP_BYTES), get(states, S_NUM_BLOCKS)
    codebook, end = get(states, S_CODEBOOK), get(states, S_VALUES_END)
    bitmap = get(states, S_BITMAP) + (head * num_blocks + block) * size * num_bytes
    unit = _unit_bytes(kind)
    values = get(states, S_VALUES) + unit * load_i32(get(states, S_OFFSETS) + 4 * (head * num_blocks + block))
    for _ in range(first):
        values += unit * _row_units(bitmap, num_bytes, group_size, kind)
        bitmap += num_bytes
    vectors = (channels + 7) >> 3
    channel_bitmap = spare + unit * 8 * vectors + READ_AHEAD
    for token in range(first, first + 8):
        if token >= size:
            for i in range(vectors):
                store8(out + 32 * i, splat(0.0))
            out += stride
            continue
        bits = bitmap
        if group_size > 1:
            _channel_bitmap(bitmap, group_size, channels, channel_bitmap)
            bits = channel_bitmap
        start = values
        if values + unit * channels + READ_AHEAD > end:
            # The buffer's last rows, from a copy that may be read past its end.
            for i in range(unit * _row_units(bitmap, num_bytes, group_size, kind)):
                store_u8(spare + i, load_u8(values + i))
            start = spare
        if kind == BF16:
            values += 2 * _row_bf16(bits, vectors, start, codebook, out)
        elif kind == 4:
            values += (4 * _row_4(bits, vectors, start, codebook, out) + 7) >> 3
        elif kind == 3:
            values += (3 * _row_3(bits, vectors, start, codebook + 32, out) + 7) >> 3
        elif kind == 2:
            values += (2 * _row_2(bits, vectors, start, codebook + 64, out) + 7) >> 3
        elif kind == 8:
            values += _row_i8(bits, vectors, start, codebook, out)
        elif kind == FP16:
            values += 2 * _row_fp16(bits, vectors, start, codebook, out)
        else:
            values += 4 * _row_fp32(bits, vectors, start, codebook, out)
        bitmap += num_bytes
        out += stride


@njit
def _raw_rows(states, head, block, length, out, stride):
    kind, head_dim = get(states, S_KIND), get(states, S_HEAD_DIM)
    row_stride = get(states, S_ROW_STRIDE)
    row = get(states, S_VALUES) + head * get(states, S_HEAD_STRIDE) + 8 * block * row_stride
    vectors = (head_dim + 7) >> 3
    for token in range(8 * block, 8 * block + 8):
        if token >= length:
            for i in range(vectors):
                store8(out + 32 * i, splat(0.0))
        else:
            if kind == RAW_FP32:
                for i in range(vectors):
                    store8(out + 32 * i, load8(row + 32 * i))
            elif kind == RAW_BF16:
                for i in range(vectors):
                    store8(out + 32 * i, load8_bf16(row + 16 * i))
            else:
                for i in range(vectors):
                    store8(out + 32 * i, load8_f16(row + 16 * i))
            row += row_stride
        out += stride


@njit
def unpack_rows(states, head, block, first, length, out, stride, lanes, spare):
    """Eight tokens of a block, from its token `first` on, as rows of `S_WIDTH` fp32.

    Args:
        states: address of the fields of K or V.
        length: tokens of a raw source that count.
        out, stride: address of the first row; bytes from row to row.
        lanes, spare: scratch for the dense channels `[S_DENSE_WIDTH, 8]` and for one packed row.
    """
    if get(states, S_KIND) >= RAW_BF16:
        _raw_rows(states, head, block, length, out, stride)
        return
    dense = get(states, S_DENSE_WIDTH)
    if dense > 0:
        dense_lanes(states, head, block, first, lanes)
        for c in range(0, dense, 8):
            transpose(lanes + 32 * c, out + 4 * c, stride)
    _sparse_rows(states, head, block, first, out + 4 * dense, stride, spare)


@njit
def prefetch_block(states, head, block):
    """Asks for the memory of a packed block ahead of its use: blocks are chosen here and there."""
    size, num_blocks = get(states, S_BLOCK_SIZE), get(states, S_NUM_BLOCKS)
    place = head * num_blocks + block
    units = load_i32(get(states, S_OFFSETS) + 4 * place)
    unit = _unit_bytes(get(states, S_KIND))
    values = get(states, S_VALUES) + unit * units
    last = get(states, S_VALUES_END)
    if block + 1 < num_blocks:
        last = get(states, S_VALUES) + unit * load_i32(get(states, S_OFFSETS) + 4 * place + 4)
    for line in range(values, last, 64):
        prefetch(line)
    _prefetch_range(get(states, S_BITMAP), place, get(states, S_BITMAP_BYTES) * size)
    table = dense_head(states, head)
    _prefetch_range(dense_tile(states, table, block, 0), 0, get(table, D_TILE_BYTES) * ((size + 7) >> 3))


@njit
def _prefetch_range(start, place, width):
    for line in range(start + place * width, start + (place + 1) * width, 64):
        prefetch(line)
