"""Principal channels of a segment: incremental moments and the basis they give (paper, stage 1)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..segments import INT8_MAX, Basis, inverse

# Tokens a pass over a long prompt works on at a time: bounds its temporary memory.
CHUNK_TOKENS = 4096
# Dense channels are stored from this many standard deviations below their mean to as many above: the unusual tokens are
# those that matter.
_RANGE = 5.0
_FEWEST_BITS = 4


class Moments:
    """First and second moments of the vectors seen so far, per KV head; vectors are added, never recomputed.

    Attributes:
        count: vectors added.
        total: `[num_kv_heads, head_dim]` fp32, their sum.
        products: `[num_kv_heads, head_dim, head_dim]` fp32, sum of their outer products.
    """

    def __init__(self, num_heads: int, head_dim: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.total = torch.zeros(num_heads, head_dim, dtype=torch.float32, device=device)
        self.products = torch.zeros(num_heads, head_dim, head_dim, dtype=torch.float32, device=device)

    @classmethod
    def of(cls, states: torch.Tensor) -> "Moments":
        """Those of `[num_kv_heads, n, head_dim]` vectors."""
        return cls(states.shape[0], states.shape[2], states.device).add(states)

    def add(self, states: torch.Tensor) -> "Moments":
        """Adds `[num_kv_heads, n, head_dim]` vectors of any float dtype; returns self."""
        for part in states.split(CHUNK_TOKENS, dim=1):
            part = part.float()
            self.total += part.sum(1)
            self.products += part.transpose(-1, -2) @ part
        self.count += states.shape[1]
        return self


Rotation = tuple[torch.Tensor | None, torch.Tensor | None]
"""`Basis.rotation` and `Basis.rotation_scale`."""


def principal_channels(moments: Moments) -> Rotation:
    """The eigenbasis of the uncentred second moments: keys of some models (Qwen2's key biases) have a large mean, which
    becomes the first channel, where the offset takes it out."""
    # Double precision: single loses the small channels' directions where one channel dominates.
    vectors = torch.linalg.eigh(moments.products.double() / moments.count).eigenvectors.flip(-1)
    # An eigenvector's sign is arbitrary; fixed here so that equal data give equal bytes.
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    scale = (largest.abs()[:, 0] / INT8_MAX).float()
    return (vectors * largest.sign() / scale[:, None]).round().to(torch.int8), scale


def fit_basis(moments: Moments, rotation: Rotation, *, num_dense: int, bits: int, step: float | None = None) -> Basis:
    """The basis for packing vectors with these moments, and vectors like them.

    Args:
        moments: of at least one vector.
        rotation: the channels, see `principal_channels`; Nones leave them as they are.
        num_dense: leading channels stored densely.
        bits: of a kept element of the other channels.
        step: their quantization step in units of the segment's standard deviation, all channels together; None if
            they are not quantized.
    """
    products, mean = moments.products.double() / moments.count, moments.total.double() / moments.count
    if rotation[0] is not None:
        to_channels = inverse(rotation[0] * rotation[1][:, None].double())
        mean = (to_channels @ mean[:, :, None])[..., 0]
        products = to_channels @ products @ to_channels.transpose(-1, -2)
    energy = products.diagonal(dim1=-2, dim2=-1)
    tiny = torch.finfo(torch.float32).tiny
    variance = (energy - mean.square()).clamp_min(0)
    unit = torch.ones_like(energy[:, 0]) if step is None else (variance.mean(-1).sqrt() * step).clamp_min(tiny)
    half = (_RANGE * variance[:, :num_dense].sqrt()).clamp_min(tiny)
    heads = len(unit)
    widest = Basis(
        rotation=rotation[0],
        rotation_scale=rotation[1],
        offset=(mean[:, :num_dense] - half).float(),
        scale=(2 * half / 255).float(),
        dense_bits=((8,) * num_dense,) * heads,
        step=unit.float(),
        bits=(bits,) * heads,
    )
    return with_steps(widest, widest.step, widest.bits)


def with_steps(basis: Basis, step: torch.Tensor, bits: Sequence[int]) -> Basis:
    """The basis with other steps, and bits, for the sparse channels: its dense ones then need to be no finer.

    Args:
        step, bits: as the attributes of `Basis`.
    """
    if bits[0] > 8:  # not quantized
        return replace(basis, step=step, bits=tuple(bits))
    span = basis.scale * (2 ** basis.dense_widths() - 1)
    widths = (span / step[:, None] + 1).log2().ceil().clamp(_FEWEST_BITS, 8).long()
    scale = (span / (2**widths - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    dense_bits = tuple(map(tuple, widths.tolist()))
    return replace(basis, scale=scale, dense_bits=dense_bits, step=step, bits=tuple(bits))
