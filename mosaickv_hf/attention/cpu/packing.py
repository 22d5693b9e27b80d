"""`pack` on CPU: what `compression.packing.pack` does, row by row, without its temporaries."""

import numpy as np
import torch
from numba import cfunc, njit

from ...compression.packing import codebook, value_dtype
from ...segments import DENSE_TILE, INT8_MAX, SPARE_BYTES, Basis, PackedStates
from .fields import D_ADDRESS, D_CHANNELS, D_TILE_BYTES, dense_table
from .simd import (
    at_least,
    get,
    load_f32,
    load_i32,
    load_u8,
    next_item,
    popcount,
    store_f32,
    store_i32,
    store_u8,
)
from .threads import SOURCES, run

(
    _COUNTER,
    _WORKERS,
    _HEADS,
    _TOKENS,
    _HEAD_DIM,
    _DENSE,
    _BLOCK_SIZE,
    _GROUP_SIZE,
    _KEPT_GROUPS,  # of each row; -1 where a threshold decides
    _THRESHOLD,  # bits of an fp32
    _BITS,  # int64 [heads]
    _ROTATED,  # fp32 [heads, tokens, head_dim]
    _OFFSET,
    _SCALE,
    _STEP,
    _DENSE_TABLE,  # see `fields.dense_table`
    _BITMAP,
    _UNITS,  # int32 [heads, blocks]: of each block
    _VALUES,
    _OFFSETS,  # int32 [heads, blocks]
    _BOUNDARIES,  # fp32 [3, 8] between the magnitudes of codes of 2, 3 and 4 bits, padded with infinity
    _SCRATCH,
    _SCRATCH_BYTES,
    _FIELDS,
) = range(24)
# Blocks of a work item.
_RANGE_BLOCKS = 32
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, to even at ties
_MAX8 = np.float32(INT8_MAX)
_SIGN_OFF = 0x7FFFFFFF


def pack(
    states: torch.Tensor,
    basis: Basis,
    *,
    selection: str,
    channel_ratio: float,
    dead_zone: float,
    group_size: int,
    block_size: int,
) -> PackedStates:
    """See `compression.packing.pack`; among elements of equal magnitude the first are kept."""
    heads, tokens, head_dim = states.shape
    num_dense = basis.scale.shape[-1]
    sparse = head_dim - num_dense
    blocks = -(-tokens // block_size)
    rotated = basis.rotate(states.detach().float()).contiguous()
    # Padding rows are zero.
    tiles = blocks * -(-block_size // DENSE_TILE)
    dense = torch.zeros(tiles * sum(map(sum, basis.dense_bits)) + SPARE_BYTES, dtype=torch.uint8)
    bitmap = torch.zeros(heads, blocks * block_size, -(-(sparse // group_size) // 8), dtype=torch.uint8)
    units = torch.empty(heads, blocks, dtype=torch.int32)
    boundaries = torch.full((3, 8), torch.inf, dtype=torch.float32, device="cpu")
    for row, width in zip(boundaries, (2, 3, 4)):
        magnitudes = codebook(width, group_size)[: 2 ** (width - 1)]
        row[: len(magnitudes) - 1] = (magnitudes[1:] + magnitudes[:-1]) / 2

    threads = torch.get_num_threads()
    scratch_bytes = -(-(12 * head_dim + 256) // 64) * 64
    scratch = torch.empty(threads * scratch_bytes, dtype=torch.uint8)
    count = -1 if selection == "threshold" else max(0, round(channel_ratio * head_dim) - num_dense) // group_size
    threshold = int(np.float32(dead_zone).view(np.int32))
    tensors = [t.contiguous() for t in (rotated, basis.offset, basis.scale, basis.step)]
    tensors += [dense_table(basis, dense.data_ptr(), tiles), bitmap, units]
    call = np.zeros(_FIELDS, dtype=np.int64)
    call[_HEADS : _DENSE + 1] = heads, tokens, head_dim, num_dense
    bits = torch.tensor(basis.bits, dtype=torch.int64, device="cpu")
    call[_BLOCK_SIZE : _BITS + 1] = block_size, group_size, count, threshold, bits.data_ptr()
    call[_ROTATED : _UNITS + 1] = [t.data_ptr() for t in tensors]
    call[_BOUNDARIES : _SCRATCH_BYTES + 1] = boundaries.data_ptr(), scratch.data_ptr(), scratch_bytes
    run(select.address, call, threads)

    flat = units.flatten()
    ends = flat.cumsum(0)
    offsets = (ends - flat).to(torch.int32).view_as(units)
    # Wider values are rounded to their dtype by torch.
    dtype = value_dtype(basis.bits[0], states.dtype)
    values = torch.empty(int(ends[-1]), dtype=dtype if dtype == torch.uint8 else torch.float32)
    call[_VALUES : _OFFSETS + 1] = values.data_ptr(), offsets.data_ptr()
    run(encode.address, call, threads)
    return PackedStates(
        dense=dense,
        bitmap=bitmap,
        values=values.to(dtype),
        offsets=offsets,
        basis=basis,
        group_size=group_size,
        head_dim=head_dim,
    )


@njit(error_model="numpy")
def _next_range(call):
    """The head, first and last block of the next work item; head -1 when there is none."""
    blocks = (get(call, _TOKENS) + get(call, _BLOCK_SIZE) - 1) // get(call, _BLOCK_SIZE)
    ranges = (blocks + _RANGE_BLOCKS - 1) // _RANGE_BLOCKS
    item = next_item(call)
    if item >= ranges * get(call, _HEADS):
        return -1, 0, 0
    first = item % ranges * _RANGE_BLOCKS
    return item // ranges, first, min(first + _RANGE_BLOCKS, blocks)


@njit
def _rounded(x, low, high):
    return min(max(x, low), high) + _ROUND - _ROUND


@njit(error_model="numpy")
def _store_dense(call, head, block, lane, row):
    """The dense channels of one rotated row, token `lane` of a block."""
    dense = get(call, _DENSE)
    table = get(call, _DENSE_TABLE) + 8 * head * (D_CHANNELS + 2 * dense)
    offset, scale = get(call, _OFFSET) + 4 * head * dense, get(call, _SCALE) + 4 * head * dense
    tile = block * ((get(call, _BLOCK_SIZE) + 7) >> 3) + (lane >> 3)
    tile = get(table, D_ADDRESS) + tile * get(table, D_TILE_BYTES)
    for c in range(dense):
        top = get(table, D_CHANNELS + 2 * c + 1) & 255
        unit = (load_f32(row + 4 * c) - load_f32(offset + 4 * c)) / load_f32(scale + 4 * c)
        code = int(_rounded(unit, np.float32(0), np.float32(top)))
        bit = (lane & 7) * popcount(top)
        out = tile + get(table, D_CHANNELS + 2 * c) + (bit >> 3)
        code <<= bit & 7
        store_u8(out, load_u8(out) | (code & 255))
        if code > 255:
            store_u8(out + 1, load_u8(out + 1) | (code >> 8))


@njit
def _count_at_least(keys, vectors, threshold):
    count = 0
    for i in range(vectors):
        count += popcount(at_least(keys + 32 * i, threshold))
    return count


@njit(error_model="numpy")
def _select_groups(call, steps, keys, bitmap):
    """Writes the bitmap of one row, `steps` of fp32; returns how many groups it keeps. `keys` is scratch."""
    group_size, wanted = get(call, _GROUP_SIZE), get(call, _KEPT_GROUPS)
    if wanted == 0:
        return 0  # the bitmap is zero
    groups = (get(call, _HEAD_DIM) - get(call, _DENSE)) // group_size
    vectors = (groups + 7) >> 3
    # Bits of positive floats sort as they do.
    for group in range(groups):
        key = np.float32(0)
        for i in range(group_size):
            x = load_f32(steps + 4 * (group * group_size + i))
            if wanted < 0:
                key = max(key, abs(x))
            else:
                key += x * x
        store_f32(keys + 4 * group, key)
    for group in range(groups, 8 * vectors):
        store_i32(keys + 4 * group, -1)
    threshold, ties = get(call, _THRESHOLD), groups
    if wanted >= 0:
        # The largest threshold that enough keys reach, bit by bit.
        threshold = 0
        for bit in range(30, -1, -1):
            higher = threshold | (1 << bit)
            if _count_at_least(keys, vectors, higher) >= wanted:
                threshold = higher
        ties = wanted - _count_at_least(keys, vectors, threshold + 1)
    count = 0
    for i in range(vectors):
        above, kept = at_least(keys + 32 * i, threshold + 1), at_least(keys + 32 * i, threshold)
        equal = kept ^ above
        while popcount(equal) > ties:
            # Drops the last of them.
            last = 128
            while equal & last == 0:
                last >>= 1
            equal ^= last
        ties -= popcount(equal)
        kept = above | equal
        store_u8(bitmap + i, kept)
        count += popcount(kept)
    return count


@njit(error_model="numpy")
def _units(count, bits):
    return (count * bits + 7) >> 3 if bits <= 4 else count


@njit(error_model="numpy")
def _encode_row(bits, steps, count, boundaries, out):
    """`count` kept elements, fp32 at `steps`, as values at `out`."""
    if bits >= 16:
        for i in range(count):
            store_f32(out + 4 * i, load_f32(steps + 4 * i))
    elif bits == 8:
        for i in range(count):
            store_u8(out + i, int(_rounded(load_f32(steps + 4 * i), -_MAX8, _MAX8)))
    else:
        pending, filled = 0, 0
        boundaries += 32 * (bits - 2)
        for i in range(count):
            magnitude = load_i32(steps + 4 * i) & _SIGN_OFF
            code = 8 - popcount(at_least(boundaries, magnitude))
            if load_f32(steps + 4 * i) < 0:
                code |= 1 << (bits - 1)
            pending |= code << filled
            filled += bits
            if filled >= 8:
                store_u8(out, pending)
                out += 1
                pending >>= 8
                filled -= 8
        if filled:
            store_u8(out, pending)


def _compile(sources: int):
    """The phases, whose compiled forms are kept on disk until `sources` changes."""

    @cfunc("void(int64)", cache=True)
    def select(call):
        sources  # noqa: B018
        scratch = get(call, _SCRATCH) + next_item(call + 8 * _WORKERS) * get(call, _SCRATCH_BYTES)
        head_dim, size, tokens = get(call, _HEAD_DIM), get(call, _BLOCK_SIZE), get(call, _TOKENS)
        dense = get(call, _DENSE)
        sparse = head_dim - dense
        blocks = (tokens + size - 1) // size
        row_bytes = (sparse // get(call, _GROUP_SIZE) + 7) >> 3
        keys = scratch + 4 * head_dim + 32
        while True:
            head, first, end = _next_range(call)
            if head < 0:
                return
            step, bits = load_f32(get(call, _STEP) + 4 * head), get(get(call, _BITS), head)
            for block in range(first, end):
                units = 0
                for token in range(block * size, min((block + 1) * size, tokens)):
                    row = get(call, _ROTATED) + 4 * (head * tokens + token) * head_dim
                    _store_dense(call, head, block, token - block * size, row)
                    for c in range(sparse):
                        store_f32(scratch + 4 * c, load_f32(row + 4 * (dense + c)) / step)
                    bitmap = get(call, _BITMAP) + (head * blocks * size + token) * row_bytes
                    count = _select_groups(call, scratch, keys, bitmap)
                    units += _units(count * get(call, _GROUP_SIZE), bits)
                store_i32(get(call, _UNITS) + 4 * (head * blocks + block), units)

    @cfunc("void(int64)", cache=True)
    def encode(call):
        sources  # noqa: B018
        scratch = get(call, _SCRATCH) + next_item(call + 8 * _WORKERS) * get(call, _SCRATCH_BYTES)
        head_dim, size, tokens = get(call, _HEAD_DIM), get(call, _BLOCK_SIZE), get(call, _TOKENS)
        group_size = get(call, _GROUP_SIZE)
        dense = get(call, _DENSE)
        blocks = (tokens + size - 1) // size
        row_bytes = ((head_dim - dense) // group_size + 7) >> 3
        while True:
            head, first, end = _next_range(call)
            if head < 0:
                return
            step, bits = load_f32(get(call, _STEP) + 4 * head), get(get(call, _BITS), head)
            unit = 4 if bits >= 16 else 1
            for block in range(first, end):
                out = get(call, _VALUES) + unit * load_i32(get(call, _OFFSETS) + 4 * (head * blocks + block))
                for token in range(block * size, min((block + 1) * size, tokens)):
                    row = get(call, _ROTATED) + 4 * ((head * tokens + token) * head_dim + dense)
                    bitmap = get(call, _BITMAP) + (head * blocks * size + token) * row_bytes
                    count = 0
                    for i in range(row_bytes):
                        kept = load_u8(bitmap + i)
                        while kept:
                            group = 8 * i + popcount((kept & -kept) - 1)
                            kept &= kept - 1
                            for c in range(group * group_size, (group + 1) * group_size):
                                store_f32(scratch + 4 * count, load_f32(row + 4 * c) / step)
                                count += 1
                    _encode_row(bits, scratch, count, get(call, _BOUNDARIES), out)
                    out += unit * _units(count, bits)

    return select, encode


select, encode = _compile(SOURCES)
