"""Scores of all blocks of several segments for one query token: by the best of K's dense channels, or by mean keys."""

import torch
import triton
import triton.language as tl

from ..attention.selection import segment_scores
from ..segments import PackedSegment
from .attention import fold_query, precision
from .bits import dense_codes
from .fields import DENSE, DENSE_TABLE, FIELDS, FIRST_BLOCK, FIRST_TOKEN, LENGTH, MEANS, NUM_BLOCKS
from .tables import Table


@triton.jit
def block_scores_kernel(
    table,
    query,
    constant,
    mask,
    mask_head,
    mask_row,
    mask_token,
    scores,
    heads,
    rows,
    total_blocks,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNELS_PADDED: tl.constexpr,
    BY_MEAN: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """See `block_scores`. A program scores BLOCKS blocks of one segment for all query rows of a KV head."""
    N: tl.constexpr = BLOCKS * BLOCK_SIZE
    head, place = tl.program_id(0), tl.program_id(2)
    segment = table + place * FIELDS
    length = tl.load(segment + LENGTH)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, BLOCK_SIZE)
    token = tl.reshape(block[:, None] * BLOCK_SIZE + within[None, :], [N])
    live = token < length
    row = tl.arange(0, ROWS)
    there = row < rows
    channel = tl.arange(0, CHANNELS_PADDED)
    at = (place * heads + head) * rows + row
    queries = tl.load(
        query + at[:, None] * CHANNELS + channel[None, :],
        mask=there[:, None] & (channel < CHANNELS)[None, :],
        other=0.0,
    )
    bias = tl.where(live[None, :] & there[:, None], 0.0, float("-inf"))
    if MASK != 0:
        seat = (
            mask
            + head * mask_head
            + row.to(tl.int64)[:, None] * mask_row
            + (tl.load(segment + FIRST_TOKEN) + token)[None, :] * mask_token
        )
        visible = live[None, :] & there[:, None]
        if MASK == 1:
            bias = tl.where(tl.load(seat, mask=visible, other=0) != 0, bias, float("-inf"))
        else:
            bias += tl.load(seat, mask=visible, other=0.0)
    if BY_MEAN:
        # Eight block keys lie side by side, channel by channel.
        means = tl.load(segment + MEANS).to(tl.pointer_type(tl.int8))
        tiles = (tl.load(segment + NUM_BLOCKS) + 7) // 8
        key = (head * tiles + block // 8)[:, None] * (8 * CHANNELS) + channel[None, :] * 8 + (block % 8)[:, None]
        inside = (block * BLOCK_SIZE < length)[:, None] & (channel < CHANNELS)[None, :]
        keys = tl.load(means + key, mask=inside, other=0).to(tl.float32)
        best = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        best += tl.max(tl.reshape(bias, [ROWS, BLOCKS, BLOCK_SIZE]), 2)
    else:
        codes = dense_codes(
            tl.load(segment + DENSE).to(tl.pointer_type(tl.uint8)),
            tl.load(segment + DENSE_TABLE).to(tl.pointer_type(tl.int64)) + head * (2 + 2 * CHANNELS),
            tl.reshape(block[:, None] * ((BLOCK_SIZE + 7) // 8) + (within // 8)[None, :], [N]),
            tl.reshape((block * 0)[:, None] + (within % 8)[None, :], [N]),
            live,
            CHANNELS,
            CHANNELS_PADDED,
        )
        logits = tl.dot(queries, tl.trans(codes), input_precision=PRECISION) + bias
        best = tl.max(tl.reshape(logits, [ROWS, BLOCKS, BLOCK_SIZE]), 2)
    best += tl.load(constant + at, mask=there, other=0.0)[:, None]
    to = (head * rows + row).to(tl.int64)[:, None] * total_blocks + (tl.load(segment + FIRST_BLOCK) + block)[None, :]
    tl.store(scores + to, best, mask=there[:, None] & (block * BLOCK_SIZE < length)[None, :])


def launch_constants(rows: int, block_size: int) -> dict[str, int]:
    """Tile sizes, by shape: 128 tokens and all query rows."""
    return {"ROWS": max(16, triton.next_power_of_2(rows)), "BLOCKS": max(1, 128 // block_size), "num_warps": 4}


@torch.library.custom_op("mosaickv::block_scores", mutates_args=())
def block_scores(
    rows: torch.Tensor,
    query: torch.Tensor,
    constant: torch.Tensor,
    mask: torch.Tensor | None,
    num_blocks: int,
    most_blocks: int,
    block_size: int,
    by_mean: bool,
) -> torch.Tensor:
    """`[num_kv_heads, query_rows, num_blocks]` fp32 scores of all segments' blocks.

    Args:
        rows, num_blocks, most_blocks: of a `Table`.
        query: `[num_segments, num_kv_heads, query_rows, channels]` fp32, in the channels that are scored, with the
            worth of a code folded in.
        constant: `[num_segments, num_kv_heads, query_rows]` fp32.
        mask: `[num_kv_heads, query_rows, tokens]`, bool or fp32, of any strides; None lets all see all.
    """
    segments, heads, query_rows, channels = query.shape
    scores = query.new_empty(heads, query_rows, num_blocks)
    launch = launch_constants(query_rows, block_size)
    grid = (heads, triton.cdiv(most_blocks, launch["BLOCKS"]), segments)
    block_scores_kernel[grid](
        rows,
        query,
        constant,
        query if mask is None else mask,
        *((0, 0, 0) if mask is None else mask.stride()),
        scores,
        heads,
        query_rows,
        num_blocks,
        BLOCK_SIZE=block_size,
        CHANNELS=channels,
        CHANNELS_PADDED=max(16, triton.next_power_of_2(channels)),
        BY_MEAN=by_mean,
        MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        PRECISION=precision(),
        **launch,
    )
    return scores


@block_scores.register_fake
def _(rows, query, constant, mask, num_blocks, most_blocks, block_size, by_mean):
    return query.new_empty(query.shape[1], query.shape[2], num_blocks)


def score_segments(
    query: torch.Tensor, segments: list[PackedSegment], table: Table, mask: torch.Tensor | None
) -> torch.Tensor:
    """`[num_kv_heads, group, blocks of all segments]` fp32: what `oracle` says in plain torch.

    Args:
        query: `[num_kv_heads, group, head_dim]` fp32, already multiplied by the softmax scale.
        mask: `[num_kv_heads, group, tokens of all segments]`, see `block_scores`.
    """
    by_mean = segments[0].block_means is not None
    if by_mean:
        folded = [
            segment.keys.basis.rotate_query(query)[..., : segment.mean_scale.shape[1]] * segment.mean_scale[:, None]
            for segment in segments
        ]
        constants = [query.new_zeros(query.shape[:2])] * len(segments)
    else:
        prepared = [fold_query(query, segment) for segment in segments]
        folded = [q[..., : segment.keys.num_dense] for (q, _), segment in zip(prepared, segments)]
        constants = [constant for _, constant in prepared]
    return block_scores(
        table.rows,
        torch.stack(folded),
        torch.stack(constants),
        mask,
        table.num_blocks,
        table.most_blocks,
        segments[0].block_size,
        by_mean,
    )


oracle = segment_scores
