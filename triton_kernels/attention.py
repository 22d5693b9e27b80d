"""Attention of query rows to packed tokens: chosen blocks of a decode step, or all of them for several queries.

Split-KV: a program takes a share of one segment's blocks for one KV head and a tile of query rows (the heads of a
group, and the tokens, share each unpacked row), and leaves a `Partial` in the segment's rotated space.
"""

import torch
import triton
import triton.language as tl

from ..attention.reference import Partial, attend_blocks, attend_segment, merge
from ..segments import PackedSegment
from .bits import INTERPRETED, dense_codes, sparse_values
from .fields import (
    BITMAP,
    BITS,
    DENSE,
    DENSE_TABLE,
    FIELDS,
    FIRST_BLOCK,
    FIRST_TOKEN,
    KEYS,
    LENGTH,
    NUM_BLOCKS,
    OFFSETS,
    VALUES,
    VALUES_STATES,
)
from .tables import StatesShape, Table


@triton.jit
def _unpack(
    segment,
    head,
    block,
    seen,
    STATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_DENSE: tl.constexpr,
    DENSE_PADDED: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BYTES_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Codes of the dense channels and values of the sparse ones; what a config has none of is a single zero."""
    N: tl.constexpr = BLOCKS * BLOCK_SIZE
    num_blocks = tl.load(segment + NUM_BLOCKS)
    if NUM_DENSE > 0:
        token = tl.arange(0, BLOCK_SIZE)
        tile = tl.reshape(block[:, None] * ((BLOCK_SIZE + 7) // 8) + (token // 8)[None, :], [N])
        lane = tl.reshape((block * 0)[:, None] + (token % 8)[None, :], [N])
        exists = tl.reshape(seen[:, None] & (token >= 0)[None, :], [N])
        table = tl.load(segment + STATES + DENSE_TABLE).to(tl.pointer_type(tl.int64))
        dense = dense_codes(
            tl.load(segment + STATES + DENSE).to(tl.pointer_type(tl.uint8)),
            table + head * (2 + 2 * NUM_DENSE),
            tile,
            lane,
            exists,
            NUM_DENSE,
            DENSE_PADDED,
        )
    else:
        dense = tl.zeros([1, 1], dtype=tl.float32)
    if ROW_BYTES > 0:
        sparse = sparse_values(
            tl.load(segment + STATES + BITMAP).to(tl.pointer_type(tl.uint8)),
            tl.load(segment + STATES + VALUES),
            tl.load(segment + STATES + OFFSETS).to(tl.pointer_type(tl.int32)),
            tl.load(tl.load(segment + STATES + BITS).to(tl.pointer_type(tl.int32)) + head),
            head,
            num_blocks,
            block,
            seen,
            BLOCKS,
            BLOCK_SIZE,
            ROW_BYTES,
            BYTES_PADDED,
            GROUP_SIZE,
            KIND,
            WORDS,
            FIXED,
        )
    else:
        sparse = tl.zeros([1, 1], dtype=tl.float32)
    return dense, sparse


@triton.jit
def packed_attention_kernel(
    table,
    query,
    constant,
    chosen,
    starts,
    mask,
    mask_head,
    mask_row,
    mask_token,
    tops,
    totals,
    outputs,
    heads,
    rows,
    num_segments,
    num_chosen,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SELECTED: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    K_DENSE: tl.constexpr,
    K_DENSE_PADDED: tl.constexpr,
    K_SPARSE: tl.constexpr,
    K_ROW_BYTES: tl.constexpr,
    K_BYTES_PADDED: tl.constexpr,
    K_KIND: tl.constexpr,
    K_WORDS: tl.constexpr,
    K_FIXED: tl.constexpr,
    V_DENSE: tl.constexpr,
    V_DENSE_PADDED: tl.constexpr,
    V_SPARSE: tl.constexpr,
    V_ROW_BYTES: tl.constexpr,
    V_BYTES_PADDED: tl.constexpr,
    V_KIND: tl.constexpr,
    V_WORDS: tl.constexpr,
    V_FIXED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """See `packed_attention`. MASK: 0 none, 1 bool, 2 float, whose row stride is that of a query row."""
    N: tl.constexpr = BLOCKS * BLOCK_SIZE
    K_WIDTH: tl.constexpr = 8 * GROUP_SIZE * K_BYTES_PADDED
    V_WIDTH: tl.constexpr = 8 * GROUP_SIZE * V_BYTES_PADDED
    head, slot = tl.program_id(0), tl.program_id(2)
    place, split = slot // SPLITS, slot % SPLITS
    segment = table + place * FIELDS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = ((place * heads + head) * rows + row).to(tl.int64)
    there = row < rows
    if K_DENSE > 0:
        channel = tl.arange(0, K_DENSE_PADDED)
        in_query = there[:, None] & (channel < K_DENSE)[None, :]
        dense_query = tl.load(query + at[:, None] * (K_DENSE + K_SPARSE) + channel[None, :], mask=in_query, other=0.0)
    if K_ROW_BYTES > 0:
        channel = tl.arange(0, K_WIDTH)
        in_query = there[:, None] & (channel < K_SPARSE)[None, :]
        sparse_query = tl.load(
            query + at[:, None] * (K_DENSE + K_SPARSE) + K_DENSE + channel[None, :], mask=in_query, other=0.0
        )
    same = tl.load(constant + at, mask=there, other=0.0)

    length = tl.load(segment + LENGTH)
    if SELECTED:
        first_block = tl.load(segment + FIRST_BLOCK)
        begin = tl.load(starts + head * (num_segments + 1) + place)
        end = tl.load(starts + head * (num_segments + 1) + place + 1)
    else:
        first_block = 0
        begin = 0
        end = ((length + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.int32)
    tiles = (end - begin + BLOCKS - 1) // BLOCKS
    share = (tiles + SPLITS - 1) // SPLITS * BLOCKS
    begin += split * share
    end = tl.minimum(end, begin + share)

    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if V_DENSE > 0:
        dense_output = tl.zeros([ROWS, V_DENSE_PADDED], dtype=tl.float32)
    if V_ROW_BYTES > 0:
        sparse_output = tl.zeros([ROWS, V_WIDTH], dtype=tl.float32)
    for first in range(begin, end, BLOCKS):
        index = first + tl.arange(0, BLOCKS)
        seen = index < end
        if SELECTED:
            block = tl.load(chosen + head * num_chosen + index, mask=seen, other=0) - first_block.to(tl.int32)
            block = tl.where(seen, block, 0)
        else:
            block = index
        token = tl.reshape(block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :], [N])
        live = tl.reshape(seen[:, None] & (tl.arange(0, BLOCK_SIZE) >= 0)[None, :], [N]) & (token < length)
        dense, sparse = _unpack(
            segment, head, block, seen, KEYS, BLOCKS, BLOCK_SIZE, K_DENSE, K_DENSE_PADDED, K_ROW_BYTES, K_BYTES_PADDED,
            GROUP_SIZE, K_KIND, K_WORDS, K_FIXED,
        )  # fmt: skip
        logits = tl.zeros([ROWS, N], dtype=tl.float32) + same[:, None]
        if K_DENSE > 0:
            logits += tl.dot(dense_query, tl.trans(dense), input_precision=PRECISION)
        if K_ROW_BYTES > 0:
            logits += tl.dot(sparse_query, tl.trans(sparse), input_precision=PRECISION)
        visible = live[None, :] & there[:, None]
        if MASK != 0:
            seat = (
                mask
                + head * mask_head
                + row.to(tl.int64)[:, None] * mask_row
                + (tl.load(segment + FIRST_TOKEN) + token)[None, :] * mask_token
            )
            if MASK == 1:
                visible &= tl.load(seat, mask=visible, other=0) != 0
            else:
                logits += tl.load(seat, mask=visible, other=0.0)
        logits = tl.where(visible, logits, float("-inf"))
        larger = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(logits - finite[:, None])
        keep = tl.exp(top - finite)
        total = total * keep + tl.sum(weights, 1)
        top = larger
        dense, sparse = _unpack(
            segment, head, block, seen, VALUES_STATES, BLOCKS, BLOCK_SIZE, V_DENSE, V_DENSE_PADDED, V_ROW_BYTES,
            V_BYTES_PADDED, GROUP_SIZE, V_KIND, V_WORDS, V_FIXED,
        )  # fmt: skip
        if V_DENSE > 0:
            dense_output = dense_output * keep[:, None] + tl.dot(weights, dense, input_precision=PRECISION)
        if V_ROW_BYTES > 0:
            sparse_output = sparse_output * keep[:, None] + tl.dot(weights, sparse, input_precision=PRECISION)

    to = ((slot * heads + head) * rows + row).to(tl.int64)
    tl.store(tops + to, top, mask=there)
    tl.store(totals + to, total, mask=there)
    if V_DENSE > 0:
        channel = tl.arange(0, V_DENSE_PADDED)
        written = there[:, None] & (channel < V_DENSE)[None, :]
        tl.store(outputs + to[:, None] * (V_DENSE + V_SPARSE) + channel[None, :], dense_output, mask=written)
    if V_ROW_BYTES > 0:
        channel = tl.arange(0, V_WIDTH)
        written = there[:, None] & (channel < V_SPARSE)[None, :]
        tl.store(outputs + to[:, None] * (V_DENSE + V_SPARSE) + V_DENSE + channel[None, :], sparse_output, mask=written)


def shape_constants(keys: StatesShape, values: StatesShape) -> dict[str, int]:
    """The kernel's compile-time sizes of K and V."""
    constants = {"GROUP_SIZE": keys.group_size}
    for kind, shape in (("K", keys), ("V", values)):
        constants |= {
            f"{kind}_DENSE": shape.num_dense,
            f"{kind}_DENSE_PADDED": shape.dense_padded,
            f"{kind}_SPARSE": shape.num_sparse,
            f"{kind}_ROW_BYTES": shape.row_bytes,
            f"{kind}_BYTES_PADDED": shape.bytes_padded,
            f"{kind}_KIND": shape.kind,
            f"{kind}_WORDS": shape.words,
            f"{kind}_FIXED": shape.fixed,
        }
    return constants


def launch_constants(block_size: int) -> dict[str, int]:
    """Tile sizes: 16 query rows by 16 tokens, the least that a matrix product takes; larger ones spill registers."""
    return {"ROWS": 16, "BLOCKS": max(1, 16 // block_size), "num_warps": 4}


def precision() -> str:
    """How `tl.dot` multiplies fp32: to fp32's own precision, on NVIDIA by three products of its tensor cores."""
    return "tf32x3" if torch.version.hip is None and not INTERPRETED else "ieee"


@torch.library.custom_op("mosaickv::packed_attention", mutates_args=())
def packed_attention(
    rows: torch.Tensor,
    query: torch.Tensor,
    constant: torch.Tensor,
    chosen: torch.Tensor | None,
    starts: torch.Tensor | None,
    mask: torch.Tensor | None,
    sizes: list[int],
    splits: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Partial`s of every segment and split, in the segments' rotated spaces.

    Args:
        rows: `Table.rows`.
        query: `[num_segments, num_kv_heads, query_rows, key_head_dim]` fp32, in each segment's channels, with the
            worth of a code and of a step folded in.
        constant: `[num_segments, num_kv_heads, query_rows]` fp32, what all logits have in common.
        chosen: int32 `[num_kv_heads, num_chosen]`, blocks numbered over all segments, in order; None for all.
        starts: int32 `[num_kv_heads, num_segments + 1]`, where each segment's begin among them.
        mask: `[num_kv_heads, query_rows, tokens]`, bool or fp32, of any strides; None lets all see all.
        sizes: `shape_constants`' values, in order.

    Returns:
        `[num_segments * splits, num_kv_heads, query_rows]` top and total, and output with V's channels behind them,
        in codes and steps.
    """
    segments, heads, query_rows, head_dim = query.shape
    constants = dict(zip(_SIZES, sizes))
    value_dim = constants["V_DENSE"] + constants["V_SPARSE"]
    top = query.new_empty(segments * splits, heads, query_rows)
    total, output = torch.empty_like(top), query.new_empty(*top.shape, value_dim)
    launch = launch_constants(block_size)
    grid = (heads, triton.cdiv(query_rows, launch["ROWS"]), segments * splits)
    packed_attention_kernel[grid](
        rows,
        query,
        constant,
        query if chosen is None else chosen,
        query if starts is None else starts,
        query if mask is None else mask,
        *((0, 0, 0) if mask is None else mask.stride()),
        top,
        total,
        output,
        heads,
        query_rows,
        segments,
        0 if chosen is None else chosen.shape[1],
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        SELECTED=chosen is not None,
        MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        PRECISION=precision(),
        **constants,
        **launch,
    )
    return top, total, output


_SIZES = tuple(shape_constants(StatesShape(0, 0, 0, 1, 0, 1, 0), StatesShape(0, 0, 0, 1, 0, 1, 0)))


@packed_attention.register_fake
def _(rows, query, constant, chosen, starts, mask, sizes, splits, block_size):
    segments, heads, query_rows, _ = query.shape
    constants = dict(zip(_SIZES, sizes))
    top = query.new_empty(segments * splits, heads, query_rows)
    return top, torch.empty_like(top), query.new_empty(*top.shape, constants["V_DENSE"] + constants["V_SPARSE"])


def attend_segments(
    query: torch.Tensor,
    segments: list[PackedSegment],
    table: Table,
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
    mask: torch.Tensor | None,
    splits: int,
) -> list[Partial]:
    """`Partial`s over packed tokens, in the model's channels, one a segment.

    Args:
        query: `[num_kv_heads, group, n, head_dim]` fp32, already multiplied by the softmax scale.
        chosen: `packed_attention`'s chosen and starts; None for all blocks.
        mask: `[num_kv_heads, group * n, tokens]`, the tokens of all segments, see `packed_attention`.
    """
    prepared = [fold_query(query.flatten(1, 2), segment) for segment in segments]
    top, total, output = packed_attention(
        table.rows,
        torch.stack([folded for folded, _ in prepared]),
        torch.stack([constant for _, constant in prepared]),
        *(chosen or (None, None)),
        mask,
        list(shape_constants(table.keys, table.values).values()),
        splits,
        segments[0].block_size,
    )
    parts = []
    for place, segment in enumerate(segments):
        at = slice(place * splits, (place + 1) * splits)
        parts.append(_join(top[at], total[at], output[at], segment, query.shape[1:3]))
    return parts


def fold_query(query: torch.Tensor, segment: PackedSegment) -> tuple[torch.Tensor, torch.Tensor]:
    """A `[num_kv_heads, rows, head_dim]` query in a segment's channels with units folded in, and its constant."""
    basis = segment.keys.basis
    rotated = basis.rotate_query(query)
    dense, sparse = rotated.split([basis.offset.shape[1], query.shape[-1] - basis.offset.shape[1]], dim=-1)
    constant = (dense @ basis.offset[..., None])[..., 0]
    return torch.cat([dense * basis.scale[:, None], sparse * basis.step[:, None, None]], dim=-1), constant


def _join(top, total, output, segment: PackedSegment, shape: torch.Size) -> Partial:
    """A segment's splits as one part, with the output turned back."""
    basis = segment.values.basis
    most = top.amax(0)
    weights = (top - most.masked_fill(most == -torch.inf, 0.0)).exp()
    whole = (weights * total).sum(0)
    dense, sparse = (
        (weights[..., None] * output)
        .sum(0)
        .split([basis.offset.shape[1], output.shape[-1] - basis.offset.shape[1]], dim=-1)
    )
    dense = dense * basis.scale[:, None] + whole[..., None] * basis.offset[:, None]
    back = basis.rotate_back(torch.cat([dense, sparse * basis.step[:, None, None]], dim=-1))
    return Partial(*(part.unflatten(1, shape) for part in (most[..., None], whole[..., None], back)))


def oracle(
    query: torch.Tensor,
    segments: list[PackedSegment],
    blocks: list[torch.Tensor] | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """What the merged parts of `attend_segments` must be, in plain torch.

    Args:
        blocks: per segment `[num_kv_heads, count]`, -1 for none; None for all blocks.
        mask: `[num_kv_heads, group, n, tokens]` or None.
    """
    parts, place = [], 0
    for i, segment in enumerate(segments):
        seen = None if mask is None else mask[..., place : place + segment.length]
        if blocks is None:
            parts += attend_segment(query, segment, seen)
        elif blocks[i].shape[1]:
            parts.append(attend_blocks(query, segment, blocks[i], seen))
        place += segment.length
    return merge(parts)
