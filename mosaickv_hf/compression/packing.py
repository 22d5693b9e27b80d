"""Select, quantize, pack, and the way back: `PackedStates` from rotated vectors (paper, "packed format").

Selecting by magnitude and quantizing with the same step belong together: an element that rounds to zero is simply
not stored. At equal bytes this has a far lower loss than the paper's 16-bit survivors (docs/decisions.md).
"""

import torch

from ..segments import DENSE_TILE, INT8_MAX, SPARE_BYTES, Basis, PackedStates

# Magnitudes, in steps, that the codes of 4-, 3- and 2-bit values stand for. They widen outwards, since large elements
# are rare but clipping them hurts. Without groups zero is never stored, so no code is spent on it.
_MAGNITUDES = {
    (4, False): (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0),
    (4, True): (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0),
    (3, False): (1.0, 2.0, 3.5, 6.0),
    (3, True): (0.0, 1.0, 2.0, 4.0),
    (2, False): (1.0, 2.4),
    (2, True): (0.0, 1.5),
}


def codebook(bits: int, group_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """`[2**bits]` fp32: the value in steps of each code: an int8; of fewer bits a magnitude with its sign on top."""
    if bits == 8:
        return torch.arange(256, device=device).to(torch.uint8).view(torch.int8).float()
    magnitudes = torch.tensor(_MAGNITUDES[bits, group_size > 1], dtype=torch.float32, device=device)
    return torch.cat([magnitudes, -magnitudes])


def nearest(magnitudes: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """What magnitudes in steps, of elements that are kept, are rounded to."""
    levels = codebook(bits, group_size, magnitudes.device).abs().unique()
    return levels[torch.bucketize(magnitudes, (levels[1:] + levels[:-1]) / 2)]


def value_dtype(bits: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype of `PackedStates.values` for vectors of a dtype."""
    if bits <= 8:
        return torch.uint8
    return torch.bfloat16 if bits == 16 and dtype != torch.float16 else dtype


def pack(
    states: torch.Tensor,
    basis: Basis,
    *,
    selection: str,
    channel_ratio: float,
    dead_zone: float,
    group_size: int,
    block_size: int,
) -> PackedStates:
    """Packs `[num_kv_heads, n, head_dim]` vectors of any float dtype, n >= 1.

    Args:
        basis: from `fit_basis`, of these or of earlier tokens.
        selection, channel_ratio, dead_zone, group_size, block_size: as in `MosaicKVConfig`.
    """
    head_dim, num_dense = states.shape[-1], basis.scale.shape[-1]
    rotated = basis.rotate(states.float())
    steps = rotated[..., num_dense:] / basis.step[:, None, None]

    groups = steps.abs().unflatten(-1, (-1, group_size))
    if selection == "threshold":
        kept = (groups >= dead_zone).any(-1)
    else:
        count = max(0, round(channel_ratio * head_dim) - num_dense) // group_size
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=states.device)
        kept.scatter_(-1, groups.square().sum(-1).topk(count, dim=-1).indices, True)

    # Every row gets its own count, padding rows none; all addresses follow from the counts.
    kept = torch.nn.functional.pad(kept, (0, 0, 0, -kept.shape[1] % block_size))
    counts = kept.sum(-1) * group_size
    units = _units(counts, basis.bits)
    starts = (units.flatten().cumsum(0) - units.flatten()).view_as(units)
    total = int(units.sum())
    elements = kept.repeat_interleave(group_size, dim=-1)[:, : states.shape[1]]
    return PackedStates(
        dense=_pack_dense(rotated[..., :num_dense], basis, block_size),
        bitmap=_to_bits(kept),
        values=_encode(steps[elements], counts, starts, total, basis.bits, group_size, states.dtype),
        offsets=starts[:, ::block_size].to(torch.int32),
        basis=basis,
        group_size=group_size,
        head_dim=head_dim,
    )


def _units(counts: torch.Tensor, bits: tuple[int, ...]) -> torch.Tensor:
    """Units of `PackedStates.values` that rows with so many kept elements take; the first dimension is KV heads."""
    if bits[0] > 8:
        return counts
    return -(-counts * torch.tensor(bits, device=counts.device).view(-1, *[1] * (counts.ndim - 1)) // 8)


def _encode(
    elements: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    units: int,
    bits: tuple[int, ...],
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Kept elements in steps, flat in row order, to the `values` of `PackedStates`.

    Args:
        counts, starts: `[num_kv_heads, rows]`, kept elements and first unit of each row.
    """
    if bits[0] > 8:
        return elements.to(value_dtype(bits[0], dtype))
    per_head = counts.sum(1)
    codes = [_codes(part, b, group_size) for part, b in zip(elements.split(per_head.tolist()), bits)]
    width = torch.tensor(bits, device=counts.device).repeat_interleave(per_head)
    counts = counts.flatten()
    rank = torch.arange(len(elements), device=counts.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = 8 * starts.flatten().repeat_interleave(counts) + rank * width
    shifted = torch.cat(codes) << (place & 7).int()
    values = torch.zeros(units + 1, dtype=torch.int32, device=counts.device)  # a code may reach into the next byte
    values.index_add_(0, place >> 3, shifted & 255).index_add_(0, (place >> 3) + 1, shifted >> 8)
    return values[:units].to(torch.uint8)


def _codes(elements: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """int32 codes, as `codebook` has them, of elements in steps."""
    if bits == 8:
        return elements.round().clamp(-INT8_MAX, INT8_MAX).int() & 255
    magnitudes = codebook(bits, group_size, elements.device)[: 2 ** (bits - 1)]
    codes = torch.bucketize(elements.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2).int()
    return codes | (elements < 0).int() << (bits - 1)


def row_units(bitmap: torch.Tensor, bits: tuple[int, ...], group_size: int) -> torch.Tensor:
    """`[num_kv_heads, rows]` int64: units of `PackedStates.values` that each row takes, from `PackedStates.bitmap`."""
    kept = bitmap.new_zeros(bitmap.shape[:2], dtype=torch.int64)
    for bit in range(8):
        kept += (bitmap >> bit & 1).sum(-1)
    return _units(kept * group_size, bits)


def unpack_blocks(packed: PackedStates, blocks: torch.Tensor) -> torch.Tensor:
    """`[num_kv_heads, num_chosen * block_size, head_dim]` fp32, in the basis' channels: the rows of some blocks.

    Args:
        blocks: `[num_kv_heads, num_chosen]` int64, block numbers per KV head.
    """
    heads, chosen = blocks.shape
    size, device = packed.block_size, packed.bitmap.device
    at = torch.arange(heads, device=device)[:, None]
    dense = unpack_dense(packed, blocks)
    bitmap = packed.bitmap.unflatten(1, (-1, size))[at, blocks]
    kept = _from_bits(bitmap, packed.num_groups)
    kept = kept.repeat_interleave(packed.group_size, dim=-1)  # [heads, chosen, size, channels]

    counts = kept.sum(-1)
    bits = packed.basis.bits
    units = _units(counts, bits)
    starts = packed.offsets[at, blocks].long()[..., None] + units.cumsum(-1) - units
    rank = kept.cumsum(-1) - 1
    if bits[0] > 8:
        elements = packed.values[(starts[..., None] + rank)[kept]].float()
    else:
        width = torch.tensor(bits, device=device)[:, None, None, None]
        place = (8 * starts[..., None] + rank * width)[kept]
        width = width.expand(kept.shape)[kept]
        last = len(packed.values) - 1
        pairs = packed.values[place >> 3].int() | packed.values[((place >> 3) + 1).clamp_max(last)].int() << 8
        codes = pairs >> (place & 7) & ((1 << width) - 1)
        books = torch.zeros(heads, 256, dtype=torch.float32, device=device)
        for head, b in enumerate(bits):
            books[head, : 2**b] = codebook(b, packed.group_size, device)
        elements = books[at[:, None, None].expand(kept.shape)[kept], codes.long()]
    tail = torch.zeros(kept.shape, dtype=torch.float32, device=device)
    tail[kept] = elements
    tail = tail.flatten(1, 2) * packed.basis.step[:, None, None]
    return torch.cat([dense, tail], dim=-1)


def unpack_dense(packed: PackedStates, blocks: torch.Tensor) -> torch.Tensor:
    """`[num_kv_heads, num_chosen * block_size, num_dense]` fp32: only the dense channels of `unpack_blocks`."""
    basis, size, device = packed.basis, packed.block_size, blocks.device
    widths = basis.dense_widths()
    per_block = -(-size // DENSE_TILE)
    tiles = (blocks[..., None] * per_block + torch.arange(per_block, device=device)).flatten(1)
    starts = widths.cumsum(1) - widths
    stride = widths.sum(1)
    heads = torch.tensor([0, *packed.head_dense_bytes()[:-1]], device=device).cumsum(0)
    at = heads[:, None, None] + tiles[..., None] * stride[:, None, None] + starts[:, None]  # [heads, tiles, channels]
    bytes_ = torch.arange(8, device=device)
    words = (packed.dense[at[..., None] + bytes_].long() << 8 * bytes_).sum(-1, keepdim=True)
    lanes = torch.arange(DENSE_TILE, device=device)
    codes = words >> widths[:, None, :, None] * lanes & (2**widths - 1)[:, None, :, None]
    codes = codes.transpose(-1, -2).unflatten(1, (-1, per_block)).flatten(2, 3)[:, :, :size].flatten(1, 2)
    return codes * basis.scale[:, None] + basis.offset[:, None]


def _pack_dense(rotated: torch.Tensor, basis: Basis, block_size: int) -> torch.Tensor:
    """`PackedStates.dense` of `[num_kv_heads, n, num_dense]` fp32 channels."""
    device = rotated.device
    widths = basis.dense_widths()
    top = (2**widths - 1)[:, None]
    codes = ((rotated - basis.offset[:, None]) / basis.scale[:, None]).round().clamp_min(0).minimum(top).long()
    pad = torch.nn.functional.pad
    codes = pad(codes, (0, 0, 0, -codes.shape[1] % block_size)).unflatten(1, (-1, block_size))
    codes = pad(codes, (0, 0, 0, -block_size % DENSE_TILE)).flatten(1, 2).unflatten(1, (-1, DENSE_TILE))
    lanes, bytes_ = torch.arange(DENSE_TILE, device=device), torch.arange(8, device=device)
    shifts = widths[:, None, None] * lanes[:, None]
    words = (codes << shifts).sum(2)  # [heads, tiles, channels]
    used = (bytes_ < widths[:, None, :, None]).expand(*words.shape, 8)
    return pad((words[..., None] >> 8 * bytes_ & 255).to(torch.uint8)[used], (0, SPARE_BYTES))


def _to_bits(kept: torch.Tensor) -> torch.Tensor:
    """bool `[..., n]` to uint8 `[..., ceil(n / 8)]`, least significant bit first."""
    kept = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (kept << torch.arange(8, dtype=torch.uint8, device=kept.device)).sum(-1, dtype=torch.uint8)


def _from_bits(bits: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of `_to_bits`, bool `[..., n]`."""
    weights = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> weights) & 1).bool().flatten(-2)[..., :n]
