"""The storage format of packed K and V: what is stored where, how many bytes it takes, and nothing else.

One `PackedSegment` holds a run of tokens of one sequence in one layer. It is immutable: sequences that share a past
(beams, several questions on one document) share its segments by reference.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

INDEX_TILE = 8
"""Block keys of a mean index that lie side by side, channel by channel."""


@dataclass(frozen=True, eq=False)
class Basis:
    """What a segment's numbers are relative to; one for K and one for V, possibly shared by several segments.

    Attributes:
        rotation: `[num_kv_heads, head_dim, head_dim]` fp16, columns are the principal channels, most energy first;
            None where channels stay as they are. Rotating and folding into the query use these same fp16 numbers.
        offset: `[num_kv_heads, num_dense]` fp32, value of a dense channel's zero: the channel's mean.
        scale: `[num_kv_heads, num_dense]` fp32, value of one unit of a dense channel.
        step: `[num_kv_heads]` fp32, value of one unit of the sparse channels; 1 for 16-bit and wider values.
    """

    rotation: torch.Tensor | None
    offset: torch.Tensor
    scale: torch.Tensor
    step: torch.Tensor

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads, n, head_dim]` fp32 from the model's channels to this basis'."""
        return states if self.rotation is None else states @ self.rotation.to(states.dtype)

    def rotate_back(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`."""
        return states if self.rotation is None else states @ self.rotation.to(states.dtype).transpose(-1, -2)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor held."""
        return (t for t in (self.rotation, self.offset, self.scale, self.step) if t is not None)


@dataclass(frozen=True, eq=False)
class PackedStates:
    """K or V of a segment, per token as: dense int8 channels | dense int4 channels | bitmap | kept elements.

    The dense channels lead and are stored for every token, block by block, channel by channel, tokens side by side
    (so that they double as an index for choosing blocks). Of the channels behind them every token keeps its own
    elements, marked in its bitmap. Rows (tokens) are padded to whole blocks; a padding row keeps nothing.

    The kept elements of a row are contiguous, in channel order, rows in order. A row starts at its block's offset
    plus the units of the rows before it in the block, which are the popcounts of their bitmaps times the group size
    (4- and 2-bit rows are rounded up to whole bytes). So fixed-r and threshold rows are addressed alike.

    Attributes:
        dense8: `[num_kv_heads, num_blocks, num_int8, block_size]` int8 u, worth `offset + u * scale`.
        dense4: `[num_kv_heads, num_blocks, num_int4, block_size / 2]` uint8; low halves are the block's first tokens,
            high halves the others; u in 0..15 is worth `offset + (u - 7.5) * scale`.
        bitmap: `[num_kv_heads, num_blocks * block_size, ceil(num_sparse / group_size / 8)]` uint8, one bit per
            group of adjacent sparse channels, least significant bit first.
        values: `[units]`; one element a unit in the dtypes int8, bf16, fp16, fp32; two (4 bits) or four (2 bits) a
            unit in uint8, lowest bits first.
        offsets: `[num_kv_heads, num_blocks]` int32, first unit of each block.
        basis: see `Basis`.
        bits: 2, 4, 8, 16 or 32 per kept element.
        group_size: adjacent channels per bitmap bit.
        head_dim: channels, dense and sparse.
    """

    dense8: torch.Tensor
    dense4: torch.Tensor
    bitmap: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    basis: Basis
    bits: int
    group_size: int
    head_dim: int

    @property
    def num_dense(self) -> int:
        return self.dense8.shape[2] + self.dense4.shape[2]

    @property
    def num_groups(self) -> int:
        """Groups of sparse channels: bits of a row's bitmap that mean something."""
        return (self.head_dim - self.num_dense) // self.group_size

    @property
    def num_blocks(self) -> int:
        return self.dense8.shape[1]

    @property
    def block_size(self) -> int:
        return self.dense8.shape[3]

    def extend(self, other: "PackedStates") -> "PackedStates":
        """These rows followed by `other`'s, which have the same basis and format."""
        # Offsets are into one buffer of all heads, so heads are interleaved anew.
        ours, theirs = self.head_units(), other.head_units()
        values = torch.cat([part for pair in zip(self.values.split(ours), other.values.split(theirs)) for part in pair])
        ours_before = _exclusive_sum(ours, self.offsets)
        theirs_before = _exclusive_sum(theirs, self.offsets)
        ours_all = torch.tensor(ours, dtype=torch.int32, device=self.offsets.device)[:, None]
        return dataclasses.replace(
            self,
            dense8=torch.cat([self.dense8, other.dense8], dim=1),
            dense4=torch.cat([self.dense4, other.dense4], dim=1),
            bitmap=torch.cat([self.bitmap, other.bitmap], dim=1),
            values=values,
            offsets=torch.cat([self.offsets + theirs_before, other.offsets + ours_before + ours_all], dim=1),
        )

    def head_units(self) -> list[int]:
        """Units of `values` that each KV head takes."""
        starts = self.offsets[:, 0].tolist() + [self.values.numel()]
        return [end - start for start, end in pairwise(starts)]


def _exclusive_sum(units: list[int], like: torch.Tensor) -> torch.Tensor:
    total = torch.tensor([0, *units[:-1]], dtype=like.dtype, device=like.device).cumsum(0, dtype=like.dtype)
    return total[:, None]


@dataclass(frozen=True, eq=False)
class PackedSegment:
    """Packed tokens of one sequence.

    Attributes:
        keys, values: see `PackedStates`; equal numbers of blocks.
        block_means: the mean index, `[num_kv_heads, ceil(num_blocks / 8), index_channels, 8]` int8 in the rotated
            space of the keys, or None where K's dense channels are the index (or every token is attended).
        mean_scale: `[num_kv_heads, index_channels]` fp32, value of one unit of `block_means`.
        length: tokens that count; rows from there on are padding or have been cropped away.
    """

    keys: PackedStates
    values: PackedStates
    block_means: torch.Tensor | None
    mean_scale: torch.Tensor | None
    length: int

    @property
    def block_size(self) -> int:
        return self.keys.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that hold a token that counts."""
        return -(-self.length // self.block_size)

    def can_extend(self, keys: Basis, values: Basis) -> bool:
        """Whether tokens packed with these bases can be appended."""
        full = self.length == self.keys.num_blocks * self.block_size
        return full and self.keys.basis is keys and self.values.basis is values

    def extend(self, other: "PackedSegment") -> "PackedSegment":
        """This segment's tokens followed by `other`'s; see `can_extend`."""
        means = self.block_means
        if means is not None:
            ours, theirs = untile(means, self.keys.num_blocks), untile(other.block_means, other.keys.num_blocks)
            means = tile(torch.cat([ours, theirs], dim=1), INDEX_TILE)
        return dataclasses.replace(
            self,
            keys=self.keys.extend(other.keys),
            values=self.values.extend(other.values),
            block_means=means,
            length=self.length + other.length,
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
            yield "values", states.dense8
            yield "values", states.dense4
            yield "values", states.values
            yield "bitmaps", states.bitmap
            yield "index", states.offsets
            for tensor in states.basis.tensors():
                yield "rotations", tensor
        if self.block_means is not None:
            yield "index", self.block_means
            yield "index", self.mean_scale


def tile(rows: torch.Tensor, width: int) -> torch.Tensor:
    """`[heads, n, channels]` to `[heads, ceil(n / width), channels, width]`, padded with zeros: rows side by side."""
    heads, n, channels = rows.shape
    tiles = -(-n // width)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, tiles * width - n))
    return rows.view(heads, tiles, width, channels).transpose(-1, -2).contiguous()


def untile(tiles: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of `tile`."""
    return tiles.transpose(-1, -2).flatten(1, 2)[:, :n]
