"""What becomes of a closed segment of generated tokens: bases of its own or those it borrowed, whichever is cheaper.

Every candidate keeps the steps, and so the noise, that was chosen for the head from what is asked of it. What is left
to weigh are bytes, rotation included, against the squared error that is actually made. At high resolution an element's
error is step^2 / 12 and falls fourfold with each bit, so at the chosen steps a bit is worth 2 ln 2 * step^2 / 12 of
squared error: the slope of rate against distortion that the steps stand for.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..config import MosaicKVConfig
from ..segments import PackedSegment, PackedStates
from .compressor import compress, fit_bases
from .packing import unpack_blocks
from .rotation import with_steps
from .strategy import States


@dataclass(frozen=True)
class Repack:
    """Work for the reorganizer: packs a segment's tokens anew if that pays.

    Attributes:
        raw: K and V in parts `[num_kv_heads, n, head_dim]`, all tokens of the segment.
        provisional: the segment as it is packed.
        queries: `[num_kv_heads, group, n, head_dim]`, recent ones, which weigh K's errors; None weighs all alike.
        config: of the cache.
    """

    raw: tuple[States, ...]
    provisional: PackedSegment
    queries: torch.Tensor | None
    config: MosaicKVConfig

    def __call__(self) -> PackedSegment:
        """The provisional segment, or one with other bases for K, for V or for both."""
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*self.raw))
        borrowed = self.provisional.keys.basis, self.provisional.values.basis
        rotations = [(basis.rotation, basis.rotation_scale) for basis in borrowed]
        candidates = [self.provisional]
        for given in (rotations, None):
            bases = fit_bases(keys, values, self.config, given)
            bases = tuple(with_steps(basis, old.step, old.bits) for basis, old in zip(bases, borrowed))
            candidates.append(compress(keys, values, bases, self.config))
        by_key = self._best([candidate.keys for candidate in candidates], keys, self.queries)
        by_value = self._best([candidate.values for candidate in candidates], values, None)
        if by_key == by_value:
            return candidates[by_key]
        chosen, other = candidates[by_key], candidates[by_value]
        return dataclasses.replace(chosen, values=other.values, losses=(chosen.losses[0], other.losses[1]))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every raw tensor held."""
        for part in self.raw:
            yield from part
        if self.queries is not None:
            yield self.queries

    @staticmethod
    def _error(packed: PackedStates, states: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        """`[num_kv_heads]`, squared error over all tokens; with queries as they see it, at an even spread the same."""
        blocks = torch.arange(packed.num_blocks, device=states.device).expand(states.shape[0], -1)
        error = packed.basis.rotate_back(unpack_blocks(packed, blocks))[:, : states.shape[1]] - states.float()
        if queries is not None:
            query = queries.flatten(1, 2).float()
            weight = query.square().sum((1, 2)).clamp_min(torch.finfo(torch.float32).tiny) / query.shape[2]
            error = error @ query.transpose(1, 2) * weight.rsqrt()[:, None, None]
        return error.square().sum((1, 2))

    def _best(self, packed: list[PackedStates], states: torch.Tensor, queries: torch.Tensor | None) -> int:
        """Which of the packed forms of these states costs least; the first is the provisional one."""
        borrowed = packed[0].basis
        held = {tensor.data_ptr() for tensor in borrowed.tensors()}
        errors = [self._error(form, states, queries) for form in packed]
        if borrowed.bits[0] <= 8:
            noise = borrowed.step.square() / 12
        else:  # not quantized: what is left out makes the error
            noise = errors[0] / states[0].numel()
        a_bit = (2 * math.log(2) * noise).clamp_min(torch.finfo(torch.float32).tiny)
        costs = []
        for form, error in zip(packed, errors):
            tensors = [form.dense, form.bitmap, form.values]
            tensors += [tensor for tensor in form.basis.tensors() if tensor.data_ptr() not in held]
            costs.append(8 * sum(tensor.nbytes for tensor in tensors) + (error / a_bit).sum().item())
        return costs.index(min(costs))
