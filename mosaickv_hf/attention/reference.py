"""Attention of one sequence's queries to its packed and raw tokens, in plain torch: the oracle for every kernel.

All of it is one softmax over three kinds of tokens (raw sinks, packed segments, raw buffer). Each part yields a
`Partial`, and partials merge by log-sum-exp, so no part needs to know of the others.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..compression import unpack_blocks
from ..config import MosaicKVConfig
from ..segments import PackedSegment
from .selection import choose_blocks

if TYPE_CHECKING:
    from ..sequence import SequenceStore

# Tokens that are unpacked at a time when all are attended to: bounds the temporary memory.
_SLICE_TOKENS = 2048


@dataclass
class Partial:
    """Softmax attention over some of the tokens, not yet normalized.

    Attributes:
        top: `[num_kv_heads, group, n, 1]` fp32, largest logit, -inf where every token is masked.
        total: the same shape, sum of `exp(logit - top)`.
        output: `[num_kv_heads, group, n, value_head_dim]` fp32, sum of `exp(logit - top) * value`.
    """

    top: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor


def attend(
    query: torch.Tensor, sequence: "SequenceStore", mask: torch.Tensor | None, config: MosaicKVConfig
) -> torch.Tensor:
    """Attention of the newest `n` tokens' queries to everything stored of their sequence, themselves included.

    Args:
        query: `[num_kv_heads, group, n, head_dim]` fp32, already multiplied by the softmax scale.
        sequence: holds `length` tokens, the queries' own tokens last.
        mask: broadcastable to `[num_kv_heads, group, n, length]`; bool (True attends) or additive float. None lets
            every query see every token.
        config: with one query token (n = 1) blocks are selected as it says; several attend to every token.

    Returns:
        `[num_kv_heads, group, n, value_head_dim]` fp32; zero where everything is masked.
    """
    place = 0
    parts = []

    def seen(length: int) -> torch.Tensor | None:
        return None if mask is None else mask[..., place : place + length]

    if sequence.sinks is not None and sequence.sinks[0].shape[1]:
        keys, values = sequence.sinks
        parts.append(attend_raw(query, keys, values, seen(keys.shape[1])))
        place += keys.shape[1]
    chosen = None
    if query.shape[2] == 1 and sequence.segments:
        chosen = choose_blocks(query[:, :, 0], sequence.segments, seen(sequence.packed_length), config)
    for i, segment in enumerate(sequence.segments):
        if chosen is None:
            parts += attend_segment(query, segment, seen(segment.length))
        elif chosen[i].shape[1]:
            parts.append(attend_blocks(query, segment, chosen[i], seen(segment.length)))
        place += segment.length
    keys, values = sequence.buffer.states()
    if keys.shape[1]:
        parts.append(attend_raw(query, keys, values, seen(keys.shape[1])))
    return merge(parts)


def attend_raw(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> Partial:
    """`Partial` over raw `[num_kv_heads, length, head_dim]` keys and values; `mask` as in `attend`."""
    return _softmax_part(_logits(query, keys.float()), values.float(), mask)


def attend_segment(query: torch.Tensor, segment: PackedSegment, mask: torch.Tensor | None) -> list[Partial]:
    """`Partial`s over all tokens of a segment, a slice of it each; `mask` as in `attend`."""
    parts = []
    heads, size = query.shape[0], segment.block_size
    for first in range(0, segment.num_blocks, max(1, _SLICE_TOKENS // size)):
        last = min(first + max(1, _SLICE_TOKENS // size), segment.num_blocks)
        blocks = torch.arange(first, last, device=query.device).expand(heads, -1)
        parts.append(attend_blocks(query, segment, blocks, mask))
    return parts


def attend_blocks(
    query: torch.Tensor, segment: PackedSegment, blocks: torch.Tensor, mask: torch.Tensor | None
) -> Partial:
    """`Partial` over some blocks of a segment.

    Args:
        blocks: `[num_kv_heads, num_chosen]` int64, num_chosen >= 1; -1 stands for none.
        mask: as in `attend`, over the segment's tokens.
    """
    absent = (blocks < 0).repeat_interleave(segment.block_size, dim=1)
    blocks = blocks.clamp_min(0)
    rotated = segment.keys.basis.rotate_query(query.flatten(1, 2)).unflatten(1, query.shape[1:3])
    logits = _logits(rotated, unpack_blocks(segment.keys, blocks))
    tokens = (blocks[..., None] * segment.block_size + torch.arange(segment.block_size, device=blocks.device)).flatten(
        1
    )
    counts = (tokens < segment.length) & ~absent
    if mask is not None:
        shape = (*torch.broadcast_shapes(mask.shape[:-1], (blocks.shape[0], 1, 1)), tokens.shape[1])
        at = tokens.clamp_max(segment.length - 1)[:, None, None].expand(shape)
        mask = mask.expand(*shape[:-1], mask.shape[-1]).gather(-1, at)
    logits = logits.masked_fill(~counts[:, None, None], -torch.inf)
    part = _softmax_part(logits, unpack_blocks(segment.values, blocks), mask)
    output = segment.values.basis.rotate_back(part.output.flatten(1, 2)).unflatten(1, query.shape[1:3])
    return Partial(part.top, part.total, output)


def merge(parts: list[Partial]) -> torch.Tensor:
    """The softmax attention over all parts' tokens together."""
    top = torch.stack([part.top for part in parts]).amax(0)
    # Where everything is masked the top is -inf; any finite number in its place gives weights of zero.
    finite = top.masked_fill(top == -torch.inf, 0.0)
    weights = [(part.top - finite).exp() for part in parts]
    total = sum(w * part.total for w, part in zip(weights, parts))
    output = sum(w * part.output for w, part in zip(weights, parts))
    return output / total.masked_fill(total == 0, 1.0)


def _logits(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`[num_kv_heads, group, n, length]` of `[.., group, n, head_dim]` and `[num_kv_heads, length, head_dim]`."""
    return (query.flatten(1, 2) @ keys.transpose(-1, -2)).unflatten(1, query.shape[1:3])


def _softmax_part(logits: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> Partial:
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top.masked_fill(top == -torch.inf, 0.0)).exp()
    output = (weights.flatten(1, 2) @ values).unflatten(1, logits.shape[1:3])
    return Partial(top, weights.sum(-1, keepdim=True), output)
