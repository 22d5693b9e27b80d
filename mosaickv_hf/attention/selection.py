"""Which blocks a decode step attends to (paper, stage 2): scores from the index, top-k per KV head."""

import math

import torch

from ..compression import unpack_dense
from ..config import MosaicKVConfig
from ..segments import PackedSegment, untile


def num_chosen_blocks(packed_length: int, num_blocks: int, config: MosaicKVConfig) -> int:
    """Blocks, of the `num_blocks` of `packed_length` tokens, that each KV head attends to."""
    tokens = max(math.ceil(config.token_ratio * packed_length), config.min_attended_tokens)
    return min(num_blocks, -(-tokens // config.block_size))


def choose_blocks(
    query: torch.Tensor, segments: list[PackedSegment], mask: torch.Tensor | None, config: MosaicKVConfig
) -> list[torch.Tensor] | None:
    """The blocks of every segment that one query token attends to; None means all of them.

    The query heads of a group choose together: a block counts as its best share of the softmax in any of them.

    Args:
        query: `[num_kv_heads, group, head_dim]` fp32, already multiplied by the softmax scale.
        segments: of one sequence, in order.
        mask: as in `attention.reference.attend`, over all their tokens and one query.

    Returns:
        one int64 tensor `[num_kv_heads, count]` a segment; a head with fewer of its blocks chosen than another has
        rows filled up with -1. Of equal scores the older blocks' count.
    """
    counts = [segment.num_blocks for segment in segments]
    length = sum(segment.length for segment in segments)
    k = num_chosen_blocks(length, sum(counts), config)
    if k == sum(counts):
        return None
    shares = block_shares(query, segments, mask)
    chosen = torch.zeros(shares.shape, dtype=torch.bool, device=shares.device)
    chosen.scatter_(1, shares.argsort(dim=-1, descending=True, stable=True)[:, :k], True)
    return [_indices(part) for part in chosen.split(counts, dim=1)]


def block_shares(query: torch.Tensor, segments: list[PackedSegment], mask: torch.Tensor | None) -> torch.Tensor:
    """`best_shares` of all segments' blocks; arguments as for `choose_blocks`."""
    return best_shares(segment_scores(query, segments, mask))


def best_shares(scores: torch.Tensor) -> torch.Tensor:
    """`[num_kv_heads, num_blocks]` fp32: logarithm of a block's largest share of the softmax over scores in any query
    head of the group, of `[num_kv_heads, group, num_blocks]` scores; -inf where nothing of a block is seen."""
    share = scores - scores.logsumexp(-1, keepdim=True)
    return share.nan_to_num(nan=-torch.inf).amax(1)


def segment_scores(query: torch.Tensor, segments: list[PackedSegment], mask: torch.Tensor | None) -> torch.Tensor:
    """`[num_kv_heads, group, blocks of all segments]` fp32: `block_scores` of each; arguments as `choose_blocks`."""
    scores = []
    place = 0
    for segment in segments:
        seen = None if mask is None else mask[..., place : place + segment.length]
        scores.append(block_scores(query, segment, seen))
        place += segment.length
    return torch.cat(scores, dim=-1)


def block_scores(query: torch.Tensor, segment: PackedSegment, mask: torch.Tensor | None) -> torch.Tensor:
    """`[num_kv_heads, group, num_blocks]` fp32: the index' estimate of each block's largest logit.

    Args:
        query: `[num_kv_heads, group, head_dim]` fp32, already multiplied by the softmax scale.
        mask: as in `choose_blocks`, over this segment's tokens; a block with no visible token scores -inf.
    """
    keys, size, count = segment.keys, segment.block_size, segment.num_blocks
    rotated = keys.basis.rotate_query(query)
    visible = torch.ones(1, 1, 1, segment.length, dtype=torch.bool, device=query.device) if mask is None else mask
    if visible.dtype == torch.bool:
        bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, -torch.inf)
    else:
        bias = visible.float()
    bias = torch.nn.functional.pad(bias[..., 0, :], (0, count * size - segment.length), value=-torch.inf)
    bias = bias.unflatten(-1, (count, size))
    if segment.block_means is None:
        blocks = torch.arange(count, device=query.device).expand(query.shape[0], -1)
        dense = unpack_dense(keys, blocks)
        logits = rotated[..., : keys.num_dense] @ dense.transpose(-1, -2)
        return (logits.unflatten(-1, (count, size)) + bias).amax(-1)
    means = untile(segment.block_means, keys.num_blocks)[:, :count].float() * segment.mean_scale[:, None]
    return rotated[..., : means.shape[-1]] @ means.transpose(-1, -2) + bias.amax(-1)


def _indices(chosen: torch.Tensor) -> torch.Tensor:
    """bool `[heads, n]` to int64 `[heads, most in a row]`: where it is True, in order, filled up with -1."""
    most = int(chosen.sum(1).max()) if chosen.numel() else 0
    order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    return order.masked_fill(~chosen.gather(1, order), -1)
