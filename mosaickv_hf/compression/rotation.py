"""Principal channels of a segment: incremental moments and the basis they give (paper, stage 1)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..segments import INT8_MAX, Basis, inverse

# Tokens a pass over a long prompt works on at a time: bounds its temporary memory.
CHUNK_TOKENS = 4096
# Dense channels are stored from their smallest to their largest value, for unusual tokens are those that matter and
# some are ten standard deviations off; and at least this many to either side, for tokens that are yet to come.
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


def fit_basis(
    states: torch.Tensor,
    rotation: Rotation | None = None,
    *,
    num_dense: int,
    bits: int,
    step: float | None = None,
) -> Basis:
    """The basis for packing these vectors, and vectors like them.

    Args:
        states: `[num_kv_heads, n, head_dim]` of any float dtype, n >= 1.
        rotation: the channels; Nones leave them as they are. By default the principal ones.
        num_dense: leading channels stored densely.
        bits: of a kept element of the other channels.
        step: their quantization step in units of the segment's standard deviation, all channels together; None if
            they are not quantized.
    """
    moments = Moments.of(states)
    if rotation is None:
        rotation = principal_channels(moments)
    products, mean = moments.products.double() / moments.count, moments.total.double() / moments.count
    to_channels = None
    if rotation[0] is not None:
        to_channels = inverse(rotation[0] * rotation[1][:, None].double())
        mean = (to_channels @ mean[:, :, None])[..., 0]
        products = to_channels @ products @ to_channels.transpose(-1, -2)
    energy = products.diagonal(dim1=-2, dim2=-1)
    tiny = torch.finfo(torch.float32).tiny
    variance = (energy - mean.square()).clamp_min(0)
    lowest, highest = _extremes(states, to_channels, num_dense)
    middle, reach = mean[:, :num_dense].float(), _RANGE * variance[:, :num_dense].sqrt().float()
    lowest = lowest.minimum(middle - reach)
    span = highest.maximum(middle + reach) - lowest
    unit = torch.ones_like(energy[:, 0]) if step is None else (variance.mean(-1).sqrt() * step).clamp_min(tiny)
    heads = len(unit)
    widest = Basis(
        rotation=rotation[0],
        rotation_scale=rotation[1],
        offset=lowest,
        scale=(span / 255).clamp_min(tiny),
        dense_bits=((8,) * num_dense,) * heads,
        step=unit.float(),
        bits=(bits,) * heads,
    )
    return with_steps(widest, widest.step, widest.bits)


def _extremes(
    states: torch.Tensor, to_channels: torch.Tensor | None, num_dense: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each leading channel, fp32 `[num_kv_heads, num_dense]` each."""
    leading = None if to_channels is None else to_channels[:, :num_dense].transpose(-1, -2).float()
    ends = []
    for part in states.split(CHUNK_TOKENS, dim=1):
        part = part[..., :num_dense].float() if leading is None else part.float() @ leading
        ends.append(torch.stack(part.aminmax(dim=1)))
    lowest, highest = torch.stack(ends, dim=1)
    return lowest.amin(0), highest.amax(0)


def with_steps(basis: Basis, step: torch.Tensor, bits: Sequence[int]) -> Basis:
    """The basis with other steps, and bits, for the sparse channels: its dense ones then need to be no finer.

    Args:
        step, bits: as the attributes of `Basis`.
    """
    if bits[0] > 8:  # not quantized
        return replace(basis, step=step, bits=tuple(bits))
    widths, scale = dense_widths(basis, step[:, None])
    dense_bits = tuple(map(tuple, widths[:, 0].tolist()))
    return replace(basis, scale=scale[:, 0], dense_bits=dense_bits, step=step, bits=tuple(bits))


def dense_widths(basis: Basis, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How the dense channels are to be quantized at some steps of the sparse ones: as fine, in 8 bits at most.

    Args:
        steps: `[num_kv_heads, n]` fp32.

    Returns:
        bits of a code, int64, and `Basis.scale`, fp32, `[num_kv_heads, n, num_dense]` each.
    """
    span = (basis.scale * (2 ** basis.dense_widths() - 1))[:, None]
    widths = (span / steps[..., None] + 1).log2().ceil().clamp(_FEWEST_BITS, 8).long()
    return widths, (span / (2**widths - 1)).clamp_min(torch.finfo(torch.float32).tiny)
