"""What kernels have in common: bit counts, codes to values, and the rows of packed states."""

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU."""

# Kinds of elements: codes of the head's bits, or plain ones.
QUANTIZED, FP16, BF16, FP32 = 0, 1, 2, 3


@triton.jit
def popcount(x):
    """Bits that are set in int32 below 256."""
    x = x - ((x >> 1) & 0x55)
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return (x + (x >> 4)) & 0x0F


@triton.jit
def code_value(code, bits, GROUP_SIZE: tl.constexpr):
    """The value in steps of a code of 8, 4, 3 or 2 bits, as `compression.packing.codebook` has them."""
    first: tl.constexpr = 1 if GROUP_SIZE == 1 else 0
    signed8 = ((code ^ 128) - 128).to(tl.float32)
    magnitude4 = code & 7
    wide4 = magnitude4 + first + tl.where(magnitude4 >= 4, (1 << (magnitude4 & 3)) - 1, 0)
    signed4 = tl.where(code & 8 != 0, -wide4, wide4).to(tl.float32)
    magnitude3 = code & 3
    if GROUP_SIZE == 1:
        wide3 = tl.where(magnitude3 < 2, magnitude3 + 1.0, 2.5 * magnitude3 - 1.5)
    else:
        wide3 = tl.where(magnitude3 < 3, magnitude3 + 0.0, 4.0)
    signed3 = tl.where(code & 4 != 0, -wide3, wide3)
    if GROUP_SIZE == 1:
        magnitude2 = tl.where(code & 1 != 0, 2.4, 1.0)
    else:
        magnitude2 = tl.where(code & 1 != 0, 1.5, 0.0)
    signed2 = tl.where(code & 2 != 0, -magnitude2, magnitude2)
    return tl.where(bits == 8, signed8, tl.where(bits == 4, signed4, tl.where(bits == 3, signed3, signed2)))


@triton.jit
def dense_codes(
    dense,
    table,
    tile,
    lane,
    seen,
    NUM_DENSE: tl.constexpr,
    DENSE_PADDED: tl.constexpr,
):
    """fp32 `[N, DENSE_PADDED]`: the codes of the dense channels of N tokens; zeros beyond NUM_DENSE.

    Args:
        dense: address of the codes.
        table: the head's row of `tables.dense_table`.
        tile, lane: `[N]`, the tiles of eight tokens, and the tokens' places in them.
        seen: `[N]`, which tokens exist.
    """
    channel = tl.arange(0, DENSE_PADDED)
    inside = channel < NUM_DENSE
    base, tile_bytes = tl.load(table), tl.load(table + 1)
    start = tl.load(table + 2 + channel, mask=inside, other=0)
    width = tl.load(table + 2 + NUM_DENSE + channel, mask=inside, other=0).to(tl.int32)
    bit = width[None, :] * lane[:, None]
    place = (base + tile * tile_bytes)[:, None] + start[None, :] + (bit >> 3)
    mask = seen[:, None] & inside[None, :]
    low = tl.load(dense + place, mask=mask, other=0).to(tl.int32)
    high = tl.load(dense + place + 1, mask=mask, other=0).to(tl.int32)
    return (((low | (high << 8)) >> (bit & 7)) & ((1 << width[None, :]) - 1)).to(tl.float32)


@triton.jit
def sparse_values(
    bitmap,
    values,
    offsets,
    bits,
    head,
    num_blocks,
    block,
    seen,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BYTES_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    FIXED: tl.constexpr,
):
    """fp32 `[N, 8 * GROUP_SIZE * BYTES_PADDED]`: the sparse channels, in steps, of all tokens of some blocks.

    A row is read as consecutive words and spread from there: single elements would be as many loads.

    Args:
        bitmap, values, offsets: the fields of `PackedStates`; of values the address, a multiple of 16.
        bits: of the head's codes, if KIND is QUANTIZED.
        block: `[BLOCKS]`; seen: `[BLOCKS]`, which of them exist.
        ROW_BYTES: of a bitmap; BYTES_PADDED: the next power of two.
        WORDS: a power of two that the words of a row do not exceed: of 32 bits if KIND is QUANTIZED, else elements.
        FIXED: elements of every row that is not padding; 0 where rows differ (or KIND is QUANTIZED).
    """
    N: tl.constexpr = BLOCKS * BLOCK_SIZE
    CHANNELS: tl.constexpr = 8 * GROUP_SIZE * BYTES_PADDED
    token = tl.arange(0, BLOCK_SIZE)
    row = tl.reshape((head * num_blocks + block)[:, None] * BLOCK_SIZE + token[None, :], [N])
    exists = tl.reshape(seen[:, None] & (token >= 0)[None, :], [N])
    byte = tl.arange(0, BYTES_PADDED)
    kept_bytes = tl.load(
        bitmap + row.to(tl.int64)[:, None] * ROW_BYTES + byte[None, :],
        mask=exists[:, None] & (byte < ROW_BYTES)[None, :],
        other=0,
    ).to(tl.int32)
    counts = popcount(kept_bytes)
    before = tl.cumsum(counts, 1) - counts
    count = tl.sum(counts, 1) * GROUP_SIZE
    units = (count * bits + 7) >> 3 if KIND == 0 else count
    by_block = tl.reshape(units, [BLOCKS, BLOCK_SIZE])
    first = tl.load(offsets + head * num_blocks + block, mask=seen, other=0)
    start = tl.reshape(first[:, None] + tl.cumsum(by_block, 1) - by_block, [N]).to(tl.int64)

    lane = tl.arange(0, 8 * GROUP_SIZE)
    bit = (lane // GROUP_SIZE)[None, None, :]
    spread = kept_bytes[:, :, None]
    kept = tl.reshape((spread >> bit) & 1, [N, CHANNELS])
    rank = GROUP_SIZE * (before[:, :, None] + popcount(spread & ((1 << bit) - 1))) + (lane % GROUP_SIZE)[None, None, :]
    rank = tl.reshape(rank, [N, CHANNELS])

    word = tl.arange(0, WORDS)
    values = tl.multiple_of(values, 16)
    if KIND == 0:
        # An aligned word that holds a byte of ours lies in our memory's page, whatever its other bytes are.
        last = (start + units + 3) >> 2
        words = tl.load(
            values.to(tl.pointer_type(tl.int32)) + (start >> 2)[:, None] + word[None, :],
            mask=exists[:, None] & ((start >> 2)[:, None] + word[None, :] < last[:, None]),
            other=0,
        )
        place = ((start & 3) * 8).to(tl.int32)[:, None] + rank * bits
        shift = place & 31
        found = tl.gather(words, tl.minimum(place >> 5, WORDS - 1), 1)
        # A code of three bits may end in the next word.
        rest = tl.gather(words, tl.minimum((place >> 5) + 1, WORDS - 1), 1)
        rest = tl.where(shift + bits > 32, rest << (32 - shift), 0)
        # An arithmetic shift fills with copies of the word's highest bit.
        code = (((found >> shift) & ((1 << tl.minimum(32 - shift, bits)) - 1)) | rest) & ((1 << bits) - 1)
        return tl.where(kept != 0, code_value(code, bits, GROUP_SIZE), 0.0)
    if KIND == 1:
        elements = values.to(tl.pointer_type(tl.float16))
    elif KIND == 2:
        elements = values.to(tl.pointer_type(tl.bfloat16))
    else:
        elements = values.to(tl.pointer_type(tl.float32))
    elements = tl.multiple_of(elements, 16)
    if FIXED > 0:
        # Where every row begins is known then, and that whole rows are read, so loads are as wide as they can be.
        start = tl.multiple_of(tl.reshape(first[:, None] + (token * FIXED)[None, :], [N]), FIXED & -FIXED)
        there = (exists & (count > 0))[:, None] & (word < FIXED)[None, :]
    else:
        there = exists[:, None] & (word[None, :] < count[:, None])
    words = tl.load(elements + start[:, None] + word[None, :], mask=there, other=0.0).to(tl.float32)
    return tl.where(kept != 0, tl.gather(words, tl.minimum(rank, WORDS - 1), 1), 0.0)
