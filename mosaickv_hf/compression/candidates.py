"""Ways to quantize a head's K or V: what each takes and what it loses, and which one to take.

Steps and bits are tried on the magnitudes of a sample of the segment's tokens, so that what rounds to zero, what is
rounded and what lies beyond the largest code all count as they are. Magnitudes come as a histogram in fractions of an
octave: a step is then a shift of it, and hundreds of candidates cost one small matrix product.
"""

import functools
import math
from dataclasses import dataclass

import torch

from ..config import MosaicKVConfig
from ..segments import Basis
from .packing import nearest
from .rotation import dense_widths, with_steps
from .strategy import SAMPLE_TOKENS, sample

# Bits that are tried for the config's, and octaves of steps to its step. Four bits stand for what pays, of which eight
# are for steps that fewer cannot represent. Coarser steps would trust a few queries for all to come.
_TRIED = {
    8: ((8, -3.375, 2.0),),
    4: ((3, -2.0, 2.0), (4, -2.0, 2.0), (8, -3.375, 0.0)),
    3: ((3, -2.0, 2.0),),
    2: ((2, -2.0, 2.0),),
}
_PER_OCTAVE = 8
# Octaves of magnitudes, to the config's step; what is outside counts as at the edge.
_LOWEST, _HIGHEST = -12, 8


@dataclass(frozen=True)
class Candidates:
    """Of one basis' heads.

    Attributes:
        bits: `[candidates]` int64, of a kept element.
        factors: `[candidates]` fp32, of the basis' steps.
        rates: `[num_kv_heads, candidates]` fp32, bits that a token's dense codes and kept elements take.
        losses: `[num_kv_heads, candidates]` fp32, relative squared error of the layer's output, see `output_weights`.
        channels: of a vector.
    """

    bits: torch.Tensor
    factors: torch.Tensor
    rates: torch.Tensor
    losses: torch.Tensor
    channels: int

    @classmethod
    def of(cls, basis: Basis, states: torch.Tensor, weights: torch.Tensor, config: MosaicKVConfig) -> "Candidates":
        """Those for packing `[num_kv_heads, n, head_dim]` states.

        Args:
            basis: quantized; its first head's bits say what may be tried.
            weights: `[num_kv_heads, head_dim]` fp32, see `output_weights`.
        """
        device, num_dense = states.device, basis.offset.shape[1]
        tried = _tried(basis.bits[0], config.group_size, config.dead_zone)
        bits, factors, errors, kept = (tensor.to(device) for tensor in tried)
        rotated = basis.rotate(sample(states, SAMPLE_TOKENS).float())[..., num_dense:]
        magnitudes = (rotated / basis.step[:, None, None]).abs()
        of_elements = of_groups = _histogram(magnitudes)
        if config.group_size > 1:
            of_groups = _histogram(magnitudes.unflatten(-1, (-1, config.group_size)).amax(-1))
        rates = of_groups.sum(1) * config.group_size @ kept * bits / rotated.shape[1]
        # In this order: weights of a layer of zeros are huge, its steps are nothing.
        of_step = weights[:, num_dense:, None] * basis.step.square()[:, None, None]
        losses = (of_elements * of_step).sum(1) @ errors / rotated.shape[1]

        steps = basis.step[:, None] * factors
        widths, scale = dense_widths(basis, steps)  # [heads, candidates, num_dense]
        losses += (scale.square() / 12 * weights[:, None, :num_dense]).sum(-1)
        # Queries that are not numbers tell nothing.
        return cls(bits, factors, rates + widths.sum(-1), losses.nan_to_num(nan=0.0), states.shape[2])

    def choose(self, basis: Basis, loss: float) -> Basis:
        """The basis with the steps and bits that pay for each head.

        A bit more of each of n elements divides a loss L by four, so at the loss to aim at a bit is worth 2 ln 2 L / n.
        One worth of bits for all heads makes their total loss the least for the bytes.
        """
        a_bit = 2 * math.log(2) * loss / self.channels
        chosen = (self.rates * a_bit + self.losses).argmin(1)
        return with_steps(basis, basis.step * self.factors[chosen], self.bits[chosen].tolist())


def _histogram(magnitudes: torch.Tensor) -> torch.Tensor:
    """`[heads, n, channels]` magnitudes to counts `[heads, channels, bins]` fp32."""
    heads, _, channels = magnitudes.shape
    bins = (_HIGHEST - _LOWEST) * _PER_OCTAVE
    tiny = torch.finfo(torch.float32).tiny
    octaves = magnitudes.clamp_min(tiny).log() / math.log(2)  # `log2` takes ten times as long
    place = ((octaves - _LOWEST) * _PER_OCTAVE).floor().clamp(0, bins - 1).long()
    place += bins * torch.arange(heads * channels, device=place.device).view(heads, 1, channels)
    return place.flatten().bincount(minlength=heads * channels * bins).view(heads, channels, bins).float()


@functools.cache
def _tried(bits: int, group_size: int, dead_zone: float) -> tuple[torch.Tensor, ...]:
    """`bits` and `factors` of `Candidates`; by magnitude `[bins, candidates]` squared errors, and shares kept."""
    # Each bin is the mean of eight magnitudes.
    count = 8 * _PER_OCTAVE * (_HIGHEST - _LOWEST)
    places = (torch.arange(count, dtype=torch.float32, device="cpu") + 0.5) / (8 * _PER_OCTAVE)
    magnitudes = 2 ** (places + _LOWEST)
    found = []
    for width, low, high in _TRIED[bits]:
        for i in range(round(low * _PER_OCTAVE), round(high * _PER_OCTAVE) + 1):
            factor = 2 ** (i / _PER_OCTAVE)
            x = magnitudes / factor
            kept = x >= dead_zone
            # In groups smaller ones are mostly stored too, if only as zero.
            stored = kept if group_size == 1 else x >= 0
            error = torch.where(stored, x - nearest(x, width, group_size), x).square() * factor**2
            found.append((width, factor, *(t.float().view(-1, 8).mean(1) for t in (error, kept))))
    widths, factors, errors, kept = zip(*found)
    return (
        torch.tensor(widths, device="cpu"),
        torch.tensor(factors, dtype=torch.float32, device="cpu"),
        torch.stack(errors, 1),
        torch.stack(kept, 1),
    )
