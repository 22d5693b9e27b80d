"""Principal channels of a segment: incremental moments and the basis they give (paper, stage 1)."""

import torch

from ..segments import INT8_MAX, Basis

# Tokens a pass over a long prompt works on at a time: bounds its temporary memory.
CHUNK_TOKENS = 4096
# Range of the dense channels, in standard deviations from the mean. Eight bits can afford to clip next to nothing, four
# cannot.
_INT8_RANGE, _INT4_RANGE = 5.0, 2.5


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
    moments: Moments, rotation: Rotation, *, num_int8: int, num_int4: int, bits: int, step: float | None = None
) -> Basis:
    """The basis for packing vectors with these moments, and vectors like them.

    Args:
        moments: of at least one vector.
        rotation: the channels, see `principal_channels`; Nones leave them as they are.
        num_int8, num_int4: leading channels stored densely.
        bits: of a kept element of the other channels.
        step: their quantization step in units of the segment's standard deviation, all channels together; None if
            they are not quantized.
    """
    products, mean = moments.products.double() / moments.count, moments.total.double() / moments.count
    if rotation[0] is not None:
        inverse = torch.linalg.inv(rotation[0] * rotation[1][:, None].double())
        mean = (inverse @ mean[:, :, None])[..., 0]
        products = inverse @ products @ inverse.transpose(-1, -2)
    energy = products.diagonal(dim1=-2, dim2=-1)
    tiny = torch.finfo(torch.float32).tiny
    variance = (energy - mean.square()).clamp_min(0)
    unit = torch.ones_like(energy[:, 0]) if step is None else (variance.mean(-1).sqrt() * step).clamp_min(tiny)
    num_dense = num_int8 + num_int4
    deviation = variance[:, :num_dense].sqrt()
    scale = torch.cat(
        [
            deviation[:, :num_int8] * (_INT8_RANGE / INT8_MAX),
            # Where the data allow it no finer than the sparse channels' step, and so no clipping.
            torch.maximum(deviation[:, num_int8:] * (_INT4_RANGE / 7.5), unit[:, None]),
        ],
        dim=1,
    )
    return Basis(
        rotation=rotation[0],
        rotation_scale=rotation[1],
        offset=mean[:, :num_dense].float(),
        scale=scale.clamp_min(tiny).float(),
        step=unit.float(),
        bits=(bits,) * len(unit),
    )
