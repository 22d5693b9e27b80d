"""The storage format of packed K and V: what is stored where, how many bytes it takes, and nothing else.

One `PackedSegment` holds a run of tokens of one sequence in one layer. It is immutable: sequences that share a past
(beams, several questions on one document) share its segments by reference.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

INT8_MAX = 127
DENSE_TILE = 8
"""Tokens whose codes of a dense channel lie together, eight codes of w bits in w bytes."""
SPARE_BYTES = 7
"""Behind the codes of the dense channels, so that the eight of a tile can be read as one 64-bit word."""
INDEX_TILE = 8
"""Block keys of a mean index that lie side by side, channel by channel."""


@dataclass(frozen=True, eq=False)
class Basis:
    """What a segment's numbers are relative to; one for K and one for V, possibly shared by several segments.

    Attributes:
        rotation: `[num_kv_heads, head_dim, head_dim]` int8, columns are the principal channels, most energy first;
            None where channels stay as they are. Vectors are given in just these rounded channels, so that rounding
            costs nothing but exact orthogonality.
        rotation_scale: `[num_kv_heads, head_dim]` fp32, value of one unit of each column; None without a rotation.
        offset: `[num_kv_heads, num_dense]` fp32, value of a dense channel's code 0.
        scale: `[num_kv_heads, num_dense]` fp32, from a code of a dense channel to the next.
        dense_bits: per KV head and dense channel, bits of a code, 1 to 8.
        step: `[num_kv_heads]` fp32, value of one unit of the sparse channels; 1 for 16-bit and wider values.
        bits: per KV head, bits of a kept element of the sparse channels: 2, 3, 4 or 8, or 16 or more for all heads.
    """

    rotation: torch.Tensor | None
    rotation_scale: torch.Tensor | None
    offset: torch.Tensor
    scale: torch.Tensor
    dense_bits: tuple[tuple[int, ...], ...]
    step: torch.Tensor
    bits: tuple[int, ...]

    def __deepcopy__(self, memo) -> "Basis":
        return self  # immutable

    def dense_widths(self) -> torch.Tensor:
        """`[num_kv_heads, num_dense]` int64: `dense_bits`."""
        return torch.tensor(self.dense_bits, dtype=torch.int64, device=self.offset.device).view(self.offset.shape)

    def axes(self) -> torch.Tensor | None:
        """`[num_kv_heads, head_dim, head_dim]` fp32, columns are the channels; None without a rotation."""
        return None if self.rotation is None else self.rotation * self.rotation_scale[:, None]

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads, n, head_dim]` fp32 vectors from the model's channels to this basis'."""
        return states if self.rotation is None else states @ inverse(self.axes()).transpose(-1, -2)

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """What a query is in this basis, so that its products with rotated vectors are those with the vectors."""
        return query if self.rotation is None else query @ self.axes()

    def rotate_back(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`."""
        return states if self.rotation is None else states @ self.axes().transpose(-1, -2)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor held."""
        held = (self.rotation, self.rotation_scale, self.offset, self.scale, self.step)
        return (t for t in held if t is not None)


@dataclass(frozen=True, eq=False)
class PackedStates:
    """K or V of a segment, per token as: dense channels | bitmap | kept elements.

    The dense channels lead and are stored for every token, tokens side by side (so that they double as an index for
    choosing blocks), in codes of as many bits as the head and channel need. Of the channels behind them every token
    keeps its own elements, marked in its bitmap. Rows (tokens) are padded to whole blocks; a padding row keeps nothing.

    The kept elements of a row are contiguous, in channel order, rows in order. A row starts at its block's offset
    plus the units of the rows before it in the block, which are the popcounts of their bitmaps times the group size
    (quantized rows are whole bytes). So fixed-r and threshold rows are addressed alike.

    Attributes:
        dense: `[bytes]` uint8: head by head, in tiles of eight tokens (a block's last one filled up), channel by
            channel, eight codes lowest bits first; code u is worth `offset + u * scale`. `SPARE_BYTES` more at the end.
        bitmap: `[num_kv_heads, num_blocks * block_size, ceil(num_sparse / group_size / 8)]` uint8, one bit per
            group of adjacent sparse channels, least significant bit first.
        values: `[units]`; unquantized elements in their dtype, one a unit; codes of quantized ones in uint8, lowest
            bits first, of one row without gaps.
        offsets: `[num_kv_heads, num_blocks]` int32, first unit of each block.
        basis: see `Basis`.
        group_size: adjacent channels per bitmap bit.
        head_dim: channels, dense and sparse.
    """

    dense: torch.Tensor
    bitmap: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    basis: Basis
    group_size: int
    head_dim: int

    @property
    def num_dense(self) -> int:
        return self.basis.offset.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups of sparse channels: bits of a row's bitmap that mean something."""
        return (self.head_dim - self.num_dense) // self.group_size

    @property
    def num_blocks(self) -> int:
        return self.offsets.shape[1]

    @property
    def block_size(self) -> int:
        return self.bitmap.shape[1] // self.num_blocks

    @classmethod
    def join(cls, parts: "Sequence[PackedStates]") -> "PackedStates":
        """All parts' rows in order; they have one basis and format, and all but the last hold whole blocks."""
        units = torch.tensor([part.head_units() for part in parts])  # [parts, heads]
        # One buffer holds all heads, so a head's units lie behind those of all parts' earlier heads.
        order = units.T.flatten()
        starts = (order.cumsum(0) - order).view(units.shape[1], -1)  # [heads, parts]
        own_starts = units.cumsum(1) - units
        shift = (starts - own_starts.T).to(torch.int32).to(parts[0].offsets.device)
        pieces = [part.values.split(count.tolist()) for part, count in zip(parts, units)]
        dense = [part.dense[:-SPARE_BYTES].split(part.head_dense_bytes()) for part in parts]
        return dataclasses.replace(
            parts[0],
            dense=torch.cat([*(codes for head in zip(*dense) for codes in head), parts[0].dense[-SPARE_BYTES:]]),
            bitmap=torch.cat([part.bitmap for part in parts], dim=1),
            values=torch.cat([piece for head in zip(*pieces) for piece in head]),
            offsets=torch.cat([part.offsets + shift[:, i, None] for i, part in enumerate(parts)], dim=1),
        )

    def head_dense_bytes(self) -> list[int]:
        """Bytes of `dense` that each KV head takes."""
        tiles = self.num_blocks * -(-self.block_size // DENSE_TILE)
        return [tiles * sum(bits) for bits in self.basis.dense_bits]

    def head_units(self) -> list[int]:
        """Units of `values` that each KV head takes."""
        starts = self.offsets[:, 0].tolist() + [self.values.numel()]
        return [end - start for start, end in pairwise(starts)]


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """Packed tokens of one sequence.

    Attributes:
        keys, values: see `PackedStates`; equal numbers of blocks.
        block_means: the mean index, `[num_kv_heads, ceil(num_blocks / 8), index_channels, 8]` int8 in the rotated
            space of the keys, or None where K's dense channels are the index (or every token is attended).
        mean_scale: `[num_kv_heads, index_channels]` fp32, value of one unit of `block_means`.
        length: tokens that count; rows from there on are padding or have been cropped away.
        losses: squared error that packing made relative to energy, of K and of V, on a sample of the tokens.
    """

    keys: PackedStates
    values: PackedStates
    block_means: torch.Tensor | None
    mean_scale: torch.Tensor | None
    length: int
    losses: tuple[float, float]

    @property
    def block_size(self) -> int:
        return self.keys.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that hold a token that counts."""
        return -(-self.length // self.block_size)

    @classmethod
    def join(cls, parts: "Sequence[PackedSegment]") -> "PackedSegment":
        """All parts' tokens in order; they have the same bases, and all but the last hold whole blocks that count."""
        means = scale = None
        lengths = [part.length for part in parts]
        if parts[0].block_means is not None:
            scale = torch.stack([part.mean_scale for part in parts]).amax(0)
            rows = [
                untile(part.block_means, part.keys.num_blocks) * (part.mean_scale / scale)[:, None] for part in parts
            ]
            means = tile(torch.cat(rows, dim=1).round().to(torch.int8), INDEX_TILE)
        return cls(
            keys=PackedStates.join([part.keys for part in parts]),
            values=PackedStates.join([part.values for part in parts]),
            block_means=means,
            mean_scale=scale,
            length=sum(lengths),
            losses=tuple(weighted_mean(losses, lengths) for losses in zip(*(part.losses for part in parts))),
        )

    def crop(self, count: int) -> "PackedSegment":
        """This segment without its newest `count` tokens, fewer than `length`; the bytes are shared.

        With a mean index the last block's mean still counts the removed tokens: it only serves to choose blocks.
        """
        return dataclasses.replace(self, length=self.length - count)

    def __deepcopy__(self, memo) -> "PackedSegment":
        return self  # immutable

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor held, with its kind: "values", "bitmaps", "rotations" or "index"."""
        for states in (self.keys, self.values):
            yield "values", states.dense
            yield "values", states.values
            yield "bitmaps", states.bitmap
            yield "index", states.offsets
            for tensor in states.basis.tensors():
                yield "rotations", tensor
        if self.block_means is not None:
            yield "index", self.block_means
            yield "index", self.mean_scale


def inverse(axes: torch.Tensor) -> torch.Tensor:
    """Of nearly orthogonal matrices, by a Cholesky factor of their products.

    `torch.linalg.inv` fails on CPU for 256 rows and more once `torch.set_num_threads` has lowered the number of threads
    and raised it again (PyTorch 2.13 with oneMKL).
    """
    transposed = axes.transpose(-1, -2)
    return torch.cholesky_solve(transposed, torch.linalg.cholesky(transposed @ axes))


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights)) / sum(weights)


def tile(rows: torch.Tensor, width: int) -> torch.Tensor:
    """`[heads, n, channels]` to `[heads, ceil(n / width), channels, width]`, padded with zeros: rows side by side."""
    heads, n, channels = rows.shape
    tiles = -(-n // width)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, tiles * width - n))
    return rows.view(heads, tiles, width, channels).transpose(-1, -2).contiguous()


def untile(tiles: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of `tile`."""
    return tiles.transpose(-1, -2).flatten(1, 2)[:, :n]
