"""`attention.reference.attend` by the kernels: scores, top-k, packed attention, one softmax with raw tokens.

A decode step waits nowhere for the device: how many blocks a head takes of each segment stays there.
"""

import weakref
from typing import TYPE_CHECKING

import torch
import triton

from ..attention.reference import attend_raw, merge
from ..attention.selection import best_shares, num_chosen_blocks
from ..config import MosaicKVConfig
from .attention import attend_segments
from .scores import score_segments
from .tables import Table

if TYPE_CHECKING:
    from ..sequence import SequenceStore

# Programs of a decode step: enough to fill a large GPU.
_PROGRAMS = 512


class _Plan:
    """What calls on a sequence have in common until its segments change."""

    def __init__(self, sequence: "SequenceStore"):
        self.segments = list(sequence.segments)
        self.table = Table(self.segments)


_plans: weakref.WeakKeyDictionary["SequenceStore", _Plan] = weakref.WeakKeyDictionary()


def attend(
    query: torch.Tensor, sequence: "SequenceStore", mask: torch.Tensor | None, config: MosaicKVConfig
) -> torch.Tensor:
    """See `attention.reference.attend`."""
    heads, group, queries, _ = query.shape
    query = query.float()
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask.float()).expand(heads, group, queries, -1)
    parts = []
    place = 0
    if sequence.sinks is not None and sequence.sinks[0].shape[1]:
        place = sequence.sinks[0].shape[1]
        parts.append(attend_raw(query, *sequence.sinks, None if mask is None else mask[..., :place]))
    if sequence.segments:
        plan = _plans.get(sequence)
        if plan is None or plan.segments != sequence.segments:
            plan = _plans[sequence] = _Plan(sequence)
        packed = sequence.packed_length
        seen = None if mask is None else mask[..., place : place + packed].flatten(1, 2)
        chosen = None
        k = num_chosen_blocks(packed, plan.table.num_blocks, config)
        if queries == 1 and k < plan.table.num_blocks:
            scores = score_segments(query[:, :, 0], plan.segments, plan.table, seen)
            chosen = choose(scores, k, plan.table.first_blocks)
        splits = max(1, _PROGRAMS // (heads * len(plan.segments) * triton.cdiv(group * queries, 16)))
        blocks = k if chosen is not None else plan.table.most_blocks
        splits = min(splits, triton.cdiv(blocks * config.block_size, 64))
        parts += attend_segments(query, plan.segments, plan.table, chosen, seen, splits)
        place += packed
    keys, values = sequence.buffer.states()
    if keys.shape[1]:
        parts.append(attend_raw(query, keys, values, None if mask is None else mask[..., place:]))
    return merge(parts)


def choose(scores: torch.Tensor, k: int, first_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The k blocks of each KV head with the best share of the softmax in any query head of the group.

    Args:
        scores: `[num_kv_heads, group, num_blocks]` fp32.
        first_blocks: `Table.first_blocks`.

    Returns:
        int32 `[num_kv_heads, k]` in order, and `[num_kv_heads, num_segments + 1]`, where each segment's begin.
    """
    chosen = best_shares(scores).topk(k, dim=-1, sorted=False).indices.to(torch.int32).sort(dim=-1).values
    starts = torch.searchsorted(chosen, first_blocks.expand(chosen.shape[0], -1).contiguous(), out_int32=True)
    return chosen, starts
