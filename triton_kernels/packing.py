"""Packing rotated vectors: select, quantize, write bitmaps, codes and values.

Two passes over the rows, as on the CPU: the first writes dense codes and bitmaps and counts, the second, once the
counts have become offsets, writes the kept elements. One token or a long prompt: the rows are the grid.
"""

import torch
import triton
import triton.language as tl

from ..compression import packing
from ..compression.packing import value_dtype
from ..segments import DENSE_TILE, SPARE_BYTES, Basis, PackedStates
from .bits import popcount
from .tables import dense_table


@triton.jit
def _round_even(x):
    """To the nearest integer, to even at ties, for |x| below 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def select_kernel(
    rotated,
    offset,
    scale,
    step,
    bits,
    dense_table,
    dense,
    bitmap,
    units,
    tokens,
    num_blocks,
    kept_groups,
    dead_zone,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_DENSE: tl.constexpr,
    DENSE_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BY_RANK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Dense codes, bitmaps, and units of each row; a program takes ROWS rows, a multiple of eight, of one KV head."""
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Dense codes are tiled by eight tokens of a block, so rows count as if each block had whole tiles.
    per_block: tl.constexpr = (BLOCK_SIZE + 7) // 8 * 8
    token = row // per_block * BLOCK_SIZE + row % per_block
    exists = (row % per_block < BLOCK_SIZE) & (token < tokens)
    stored = (row % per_block < BLOCK_SIZE) & (token < num_blocks * BLOCK_SIZE)
    source = rotated + (head * tokens + token).to(tl.int64)[:, None] * HEAD_DIM
    if NUM_DENSE > 0:
        channel = tl.arange(0, DENSE_PADDED)
        inside = channel < NUM_DENSE
        table = dense_table + head * (2 + 2 * NUM_DENSE)
        start = tl.load(table + 2 + channel, mask=inside, other=0)
        width = tl.load(table + 2 + NUM_DENSE + channel, mask=inside, other=1)
        zero = tl.load(offset + head * NUM_DENSE + channel, mask=inside, other=0.0)
        unit = tl.load(scale + head * NUM_DENSE + channel, mask=inside, other=1.0)
        x = tl.load(source + channel[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        highest = ((1 << width) - 1).to(tl.float32)
        code = tl.minimum(tl.maximum((x - zero[None, :]) / unit[None, :], 0.0), highest[None, :])
        code = tl.where(exists[:, None], _round_even(code), 0.0).to(tl.int64)
        tiled = tl.reshape(code, [ROWS // 8, 8, DENSE_PADDED])
        lane = tl.arange(0, 8)
        word = tl.sum(tiled << (lane[None, :, None] * width[None, None, :]), 1)
        tile = tl.program_id(1) * (ROWS // 8) + tl.arange(0, ROWS // 8)
        byte = tl.arange(0, 8)
        at = tl.load(table) + tile[:, None, None] * tl.load(table + 1) + start[None, :, None] + byte[None, None, :]
        used = (tile < num_blocks * (per_block // 8))[:, None, None] & inside[None, :, None]
        used = used & (byte[None, None, :] < width[None, :, None])
        tl.store(dense + at, ((word[:, :, None] >> (8 * byte)[None, None, :]) & 255).to(tl.uint8), mask=used)
    if GROUPS > 0:
        group = tl.arange(0, GROUPS_PADDED)
        a_step = tl.load(step + head)
        key = tl.zeros([ROWS, GROUPS_PADDED], dtype=tl.float32)
        for i in tl.static_range(GROUP_SIZE):
            at = NUM_DENSE + group * GROUP_SIZE + i
            x = tl.load(source + at[None, :], mask=exists[:, None] & (group < GROUPS)[None, :], other=0.0) / a_step
            if BY_RANK:
                key += x * x
            else:
                key = tl.maximum(key, tl.abs(x))
        real = exists[:, None] & (group < GROUPS)[None, :]
        if BY_RANK:
            # The largest threshold that enough keys reach, bit by bit: bits of positive floats sort as they do.
            order = tl.where(real, key.to(tl.int32, bitcast=True), -1)
            threshold = tl.zeros([ROWS], dtype=tl.int32)
            for i in range(31):
                higher = threshold | (1 << (30 - i))
                enough = tl.sum((order >= higher[:, None]).to(tl.int32), 1) >= kept_groups
                threshold = tl.where(enough, higher, threshold)
            above = order > threshold[:, None]
            equal = order == threshold[:, None]
            left = kept_groups - tl.sum(above.to(tl.int32), 1)
            kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= left[:, None]))
            kept = kept & (kept_groups > 0) & real
        else:
            kept = (key >= dead_zone) & real
        count = tl.sum(kept.to(tl.int32), 1) * GROUP_SIZE
        lane = tl.arange(0, 8)
        packed = tl.sum(tl.reshape(kept.to(tl.int32), [ROWS, GROUPS_PADDED // 8, 8]) << lane[None, None, :], 2)
        byte = tl.arange(0, GROUPS_PADDED // 8)
        to = bitmap + (head * num_blocks * BLOCK_SIZE + token).to(tl.int64)[:, None] * ROW_BYTES + byte[None, :]
        tl.store(to, packed.to(tl.uint8), mask=stored[:, None] & (byte < ROW_BYTES)[None, :])
    else:
        count = tl.zeros([ROWS], dtype=tl.int32)
    if not PLAIN:
        count = (count * tl.load(bits + head) + 7) >> 3
    tl.store(units + head * num_blocks * BLOCK_SIZE + token, count, mask=stored)


@triton.jit
def encode_kernel(
    rotated,
    step,
    bits,
    bitmap,
    starts,
    values,
    tokens,
    num_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_DENSE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BYTES_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Kept elements of ROWS rows of one KV head, whose first units are at `starts`.

    Codes of several elements share a word, whose bits are added up in place.
    """
    CHANNELS: tl.constexpr = 8 * GROUP_SIZE * BYTES_PADDED
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < tokens
    byte = tl.arange(0, BYTES_PADDED)
    kept_bytes = tl.load(
        bitmap + (head * num_rows + row).to(tl.int64)[:, None] * ROW_BYTES + byte[None, :],
        mask=exists[:, None] & (byte < ROW_BYTES)[None, :],
        other=0,
    ).to(tl.int32)
    counts = popcount(kept_bytes)
    before = tl.cumsum(counts, 1) - counts
    lane = tl.arange(0, 8 * GROUP_SIZE)
    bit = (lane // GROUP_SIZE)[None, None, :]
    spread = kept_bytes[:, :, None]
    kept = tl.reshape((spread >> bit) & 1, [ROWS, CHANNELS]) != 0
    rank = GROUP_SIZE * (before[:, :, None] + popcount(spread & ((1 << bit) - 1))) + (lane % GROUP_SIZE)[None, None, :]
    rank = tl.reshape(rank, [ROWS, CHANNELS]).to(tl.int64)
    channel = NUM_DENSE + tl.arange(0, CHANNELS)
    x = tl.load(
        rotated + (head * tokens + row).to(tl.int64)[:, None] * HEAD_DIM + channel[None, :], mask=kept, other=0.0
    )
    x = x / tl.load(step + head)
    start = tl.load(starts + head * num_rows + row, mask=exists, other=0)[:, None]
    if PLAIN:
        tl.store(values + start + rank, x, mask=kept)
    else:
        width = tl.load(bits + head)
        code8 = _round_even(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int32) & 255
        size = tl.abs(x)
        sign = tl.where(x < 0, 1, 0)
        # How many of the bounds between neighbouring magnitudes are below.
        first: tl.constexpr = 1.5 if GROUP_SIZE == 1 else 0.5
        code4 = (size > first).to(tl.int32) + (size > first + 1) + (size > first + 2) + (size > first + 3)
        code4 += (size > first + 4.5).to(tl.int32) + (size > first + 7) + (size > first + 11)
        code4 = code4 | (sign << 3)
        if GROUP_SIZE == 1:
            code3 = (size > 1.5).to(tl.int32) + (size > 2.75) + (size > 4.75)
        else:
            code3 = (size > 0.5).to(tl.int32) + (size > 1.5) + (size > 3.0)
        code3 = code3 | (sign << 2)
        bound2: tl.constexpr = 1.7 if GROUP_SIZE == 1 else 0.75
        code2 = (size > bound2).to(tl.int32) | (sign << 1)
        code = tl.where(width == 8, code8, tl.where(width == 4, code4, tl.where(width == 3, code3, code2)))
        place = start * 8 + rank * width
        shift = (place & 31).to(tl.int32)
        tl.atomic_add(values + (place >> 5), code << shift, mask=kept, sem="relaxed")
        # A code of three bits may end in the next word.
        ends_there = kept & (shift + width > 32)
        tl.atomic_add(values + (place >> 5) + 1, code >> (32 - shift), mask=ends_there, sem="relaxed")


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
    """See `compression.packing.pack`, whose result this has, bit for bit but for what rounding decides.

    The number of kept elements decides how much memory is asked for, so the host waits for it once.
    """
    tokens, head_dim = states.shape[1:]
    num_dense = basis.offset.shape[1]
    count = -1 if selection == "threshold" else max(0, round(channel_ratio * head_dim) - num_dense) // group_size
    plain = basis.bits[0] > 8
    num_blocks = -(-tokens // block_size)
    num_tiles = num_blocks * -(-block_size // DENSE_TILE)
    table = dense_table(basis, num_tiles)
    dense_bytes = num_tiles * sum(map(sum, basis.dense_bits)) + SPARE_BYTES
    bits = torch.tensor(basis.bits, dtype=torch.int32, device=states.device)
    rotated = basis.rotate(states.detach().float()).contiguous()
    dense, bitmap, units = select(
        rotated,
        basis.offset,
        basis.scale,
        basis.step,
        bits,
        table,
        dense_bytes,
        count,
        dead_zone,
        group_size,
        block_size,
        plain,
    )
    ends = units.flatten().cumsum(0)
    starts = (ends - units.flatten()).view_as(units)
    values = encode(rotated, basis.step, bits, bitmap, starts, int(ends[-1]), num_dense, group_size, plain)
    dtype = value_dtype(basis.bits[0], states.dtype)
    return PackedStates(
        dense=dense,
        bitmap=bitmap,
        values=values.to(dtype) if plain else values,
        offsets=starts[:, ::block_size].to(torch.int32).contiguous(),
        basis=basis,
        group_size=group_size,
        head_dim=head_dim,
    )


@torch.library.custom_op("mosaickv::select", mutates_args=())
def select(
    rotated: torch.Tensor,
    offset: torch.Tensor,
    scale: torch.Tensor,
    step: torch.Tensor,
    bits: torch.Tensor,
    table: torch.Tensor,
    dense_bytes: int,
    kept_groups: int,
    dead_zone: float,
    group_size: int,
    block_size: int,
    plain: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`PackedStates.dense` and `.bitmap`, and int64 `[num_kv_heads, rows]` units of each row.

    Args:
        rotated: `[num_kv_heads, n, head_dim]` fp32.
        offset, scale, step, bits: of the basis, bits as int32.
        table: `tables.dense_table`; dense_bytes: size of the result.
        kept_groups: of each row; -1 where a threshold decides.
        plain: whether elements are kept as they are, a unit each.
    """
    heads, tokens, head_dim = rotated.shape
    dense, bitmap, units = _outputs(rotated, offset, dense_bytes, group_size, block_size)
    num_dense, num_blocks = offset.shape[1], units.shape[1] // block_size
    groups = (head_dim - num_dense) // group_size
    dense[dense_bytes - SPARE_BYTES :] = 0
    launch = launch_constants(head_dim)
    per_block = -(-block_size // DENSE_TILE) * DENSE_TILE
    select_kernel[(heads, triton.cdiv(num_blocks * per_block, launch["ROWS"]))](
        rotated,
        offset.contiguous(),
        scale.contiguous(),
        step.contiguous(),
        bits,
        table,
        dense,
        bitmap,
        units,
        tokens,
        num_blocks,
        kept_groups,
        dead_zone,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        NUM_DENSE=num_dense,
        DENSE_PADDED=triton.next_power_of_2(max(num_dense, 1)),
        GROUPS=groups,
        GROUPS_PADDED=triton.next_power_of_2(max(groups, 8)),
        GROUP_SIZE=group_size,
        ROW_BYTES=bitmap.shape[2],
        BY_RANK=kept_groups >= 0,
        PLAIN=plain,
        **launch,
    )
    return dense, bitmap, units


def _outputs(rotated, offset, dense_bytes, group_size, block_size):
    heads, tokens, head_dim = rotated.shape
    rows = -(-tokens // block_size) * block_size
    row_bytes = -(-((head_dim - offset.shape[1]) // group_size) // 8)
    return (
        rotated.new_empty(dense_bytes, dtype=torch.uint8),
        rotated.new_empty(heads, rows, row_bytes, dtype=torch.uint8),
        rotated.new_empty(heads, rows, dtype=torch.int64),
    )


@select.register_fake
def _(rotated, offset, scale, step, bits, table, dense_bytes, kept_groups, dead_zone, group_size, block_size, plain):
    return _outputs(rotated, offset, dense_bytes, group_size, block_size)


@torch.library.custom_op("mosaickv::encode", mutates_args=())
def encode(
    rotated: torch.Tensor,
    step: torch.Tensor,
    bits: torch.Tensor,
    bitmap: torch.Tensor,
    starts: torch.Tensor,
    units: int,
    num_dense: int,
    group_size: int,
    plain: bool,
) -> torch.Tensor:
    """`PackedStates.values`, fp32 where `plain`.

    Args:
        rotated, step, bits, bitmap, plain: as for `select` and from it.
        starts: int64 `[num_kv_heads, rows]`, first unit of each row; units: of all.
    """
    heads, tokens, head_dim = rotated.shape
    if plain:
        values = rotated.new_empty(units)
    else:
        values = torch.zeros(-(-units // 4), dtype=torch.int32, device=rotated.device)
    launch = launch_constants(head_dim)
    row_bytes = bitmap.shape[2]
    if row_bytes:
        encode_kernel[(heads, triton.cdiv(tokens, launch["ROWS"]))](
            rotated,
            step.contiguous(),
            bits,
            bitmap,
            starts.contiguous(),
            values,
            tokens,
            bitmap.shape[1],
            HEAD_DIM=head_dim,
            NUM_DENSE=num_dense,
            ROW_BYTES=row_bytes,
            BYTES_PADDED=triton.next_power_of_2(row_bytes),
            GROUP_SIZE=group_size,
            PLAIN=plain,
            **launch,
        )
    return values if plain else values.view(torch.uint8)[:units].clone()


@encode.register_fake
def _(rotated, step, bits, bitmap, starts, units, num_dense, group_size, plain):
    return rotated.new_empty(units, dtype=torch.float32 if plain else torch.uint8)


def launch_constants(head_dim: int) -> dict[str, int]:
    """Tile sizes, by shape."""
    return {"ROWS": 16 if head_dim <= 128 else 8, "num_warps": 4}


oracle = packing.pack
