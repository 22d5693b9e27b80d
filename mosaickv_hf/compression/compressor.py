"""The one place where a config becomes bases and segments."""

from collections.abc import Sequence

import torch

from ..backend import uses_numba, uses_triton
from ..config import MosaicKVConfig
from ..segments import INDEX_TILE, INT8_MAX, Basis, PackedSegment, PackedStates, tile
from .packing import pack
from .rotation import CHUNK_TOKENS, Rotation, fit_basis
from .strategy import relative_losses

Bases = tuple[Basis, Basis]


def fit_bases(
    keys: torch.Tensor, values: torch.Tensor, config: MosaicKVConfig, rotations: Sequence[Rotation] | None = None
) -> Bases:
    """Bases for packing these K and V, `[num_kv_heads, n, head_dim]` each.

    Args:
        rotations: of K and V, if others' are to be shared.
    """

    def fit(kind: str, states: torch.Tensor, rotation: Rotation | None) -> Basis:
        if not config.rotate:
            rotation = (None, None)
        num_dense = config.dense_channels(kind, states.shape[-1])
        bits = getattr(config, f"{kind}_bits")
        if bits == "native":
            bits = 8 * states.dtype.itemsize
        step = getattr(config, f"{kind}_step") if bits <= 8 else None
        return fit_basis(states, rotation, num_dense=num_dense, bits=bits, step=step)

    of_keys, of_values = rotations or (None, None)
    return fit("key", keys, of_keys), fit("value", values, of_values)


def compress(keys: torch.Tensor, values: torch.Tensor, bases: Bases, config: MosaicKVConfig) -> PackedSegment:
    """Packs `[num_kv_heads, n, head_dim]` keys and values, n >= 1, in the model's dtype."""
    # A chunk is a multiple of the block size, so chunks join at block edges.
    chunk = max(1, CHUNK_TOKENS // config.block_size) * config.block_size
    parts = [_compress_part(*part, bases, config) for part in zip(keys.split(chunk, dim=1), values.split(chunk, dim=1))]
    return parts[0] if len(parts) == 1 else PackedSegment.join(parts)


def _compress_part(keys: torch.Tensor, values: torch.Tensor, bases: Bases, config: MosaicKVConfig) -> PackedSegment:
    pack_states = pack
    if uses_numba(keys.device, config):
        from ..attention.cpu import pack as pack_states  # compiling, or loading what is compiled, takes a moment
    elif uses_triton(keys.device, config):
        from ..triton_kernels import pack as pack_states

    def packed(states: torch.Tensor, basis: Basis, kind: str) -> PackedStates:
        return pack_states(
            states,
            basis,
            selection=config.selection,
            channel_ratio=getattr(config, f"{kind}_channel_ratio"),
            dead_zone=config.dead_zone,
            group_size=config.group_size,
            block_size=config.block_size,
        )

    packed_keys, packed_values = packed(keys, bases[0], "key"), packed(values, bases[1], "value")
    means = scale = None
    if config.block_index == "mean" and config.token_ratio < 1:
        means, scale = _block_means(keys, bases[0], config)
    losses = relative_losses((keys, values), bases, config)
    return PackedSegment(packed_keys, packed_values, means, scale, keys.shape[1], losses)


def _block_means(keys: torch.Tensor, basis: Basis, config: MosaicKVConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean index of `PackedSegment`: `block_means` and `mean_scale`."""
    length, size = keys.shape[1], config.block_size
    padded = torch.nn.functional.pad(keys.float(), (0, 0, 0, -length % size)).unflatten(1, (-1, size))
    counts = torch.full(padded.shape[1:2], size, device=keys.device)
    counts[-1] -= -length % size
    means = basis.rotate(padded.sum(2) / counts[:, None])[..., : config.index_channels]
    scale = means.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / INT8_MAX
    return tile((means / scale[:, None]).round().to(torch.int8), INDEX_TILE), scale
