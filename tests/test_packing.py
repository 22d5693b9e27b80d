"""Packing is checked against what the strategy says should be left of each vector, element by element."""

import dataclasses
import itertools

import pytest
import torch

from mosaickv_hf.compression import pack, unpack_blocks
from mosaickv_hf.compression.packing import codebook
from mosaickv_hf.compression.rotation import Moments, fit_basis
from mosaickv_hf.segments import SPARE_BYTES, PackedStates


def states(heads=3, n=37, head_dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.linspace(2, 0.2, head_dim)
    mixing = torch.linalg.qr(torch.randn(heads, head_dim, head_dim, generator=generator))[0]
    return (torch.randn(heads, n, head_dim, generator=generator) * spectrum) @ mixing + 0.5


def unpack(packed, n):
    return unpack_blocks(packed, torch.arange(packed.num_blocks).expand(packed.bitmap.shape[0], -1))[:, :n]


@pytest.mark.parametrize("n", [1, 7, 8, 37])
@pytest.mark.parametrize(("bits", "group_size"), itertools.product([2, 3, 4, 8, 16, 32], [1, 2, 4]))
@pytest.mark.parametrize("selection", ["top_r", "threshold"])
def test_what_is_kept(selection, bits, group_size, n):
    x = states(n=n)
    step = 0.5 if bits <= 8 else None
    basis = fit_basis(x, num_dense=16, bits=bits, step=step)
    dtype = torch.float32 if bits == 32 else torch.bfloat16
    packed = pack(
        x, basis, selection=selection, channel_ratio=0.5, dead_zone=0.5, group_size=group_size,
        block_size=8,
    )  # fmt: skip
    y, got = basis.rotate(x), unpack(packed, n)

    dense = (y[..., :16] - got[..., :16]).abs()
    # The range holds all of them; both rotations are of fp32.
    assert (dense <= basis.scale[:, None] * 0.5001 + 1e-4).all()
    if bits <= 8:
        assert (basis.scale <= basis.step[:, None]).all()

    tail = (y[..., 16:] / basis.step[:, None, None]).unflatten(-1, (-1, group_size))
    energy = tail.square().sum(-1)
    if selection == "threshold":
        kept = (tail.abs() >= 0.5).any(-1)
    else:
        count = (32 - 16) // group_size
        kept = energy >= energy.topk(count, -1).values[..., -1:]
        assert (kept.sum(-1) == count).all()
    kept = kept.repeat_interleave(group_size, -1)
    tail, got = tail.flatten(-2), got[..., 16:] / basis.step[:, None, None]
    assert (got[~kept] == 0).all()
    if bits >= 16:
        assert torch.equal(got[kept], tail[kept].to(dtype).float())
    elif bits == 8:
        assert torch.allclose(got[kept], tail[kept].round().clamp(-127, 127), atol=1e-4)
    else:
        levels = codebook(bits, group_size)
        nearest = (tail[kept][:, None] - levels).abs().amin(-1)
        assert torch.allclose((tail[kept] - got[kept]).abs(), nearest, atol=1e-4)


def test_large_heads_rotate_whatever_threads_were_set_before():
    """The background thread and callers change torch's number of threads; LAPACK's LU did not survive that."""
    threads = torch.get_num_threads()
    x = states(heads=2, n=300, head_dim=256)
    for count in (1, 2, threads):
        torch.set_num_threads(count)
        basis = fit_basis(x, num_dense=8, bits=4, step=0.5)
        torch.testing.assert_close(basis.rotate_back(basis.rotate(x)), x, atol=2e-4, rtol=0)


def test_storage_is_packed():
    """Bytes are those of the kept elements, one bit a channel and the addresses, whatever the strategy."""
    x = states(n=64)
    basis = fit_basis(x, num_dense=0, bits=4, step=0.5)
    packed = pack(
        x, basis, selection="top_r", channel_ratio=0.25, dead_zone=0.5, group_size=1,
        block_size=8,
    )  # fmt: skip
    assert packed.values.nbytes == 3 * 64 * 16 // 2
    assert packed.bitmap.nbytes == 3 * 64 * 64 // 8
    assert packed.offsets.dtype == torch.int32 and packed.offsets.numel() == 3 * 8
    assert packed.dense.nbytes == SPARE_BYTES


@pytest.mark.parametrize("bits", [(2, 2, 2), (4, 4, 4), (8, 3, 2), (16, 16, 16)])
def test_joining_is_packing_at_once(bits):
    x = states(n=45)
    basis = fit_basis(x, num_dense=8, bits=8, step=0.5)
    basis = dataclasses.replace(basis, bits=bits)
    kwargs = dict(
        selection="threshold", channel_ratio=1.0, dead_zone=0.5, group_size=1,
        block_size=8,
    )  # fmt: skip
    whole = pack(x, basis, **kwargs)
    parts = PackedStates.join([pack(part, basis, **kwargs) for part in x.split(16, dim=1)])
    for name in ("dense", "bitmap", "values", "offsets"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name


@pytest.mark.parametrize("group_size", [1, 2])
def test_heads_of_different_bits_are_packed_as_each_alone(group_size):
    """Rows of three, four and eight bits lie in one buffer; blocks are picked here and there."""
    x = states(n=45)
    fitted = fit_basis(x, num_dense=8, bits=8, step=0.3)
    kwargs = dict(
        selection="threshold", channel_ratio=1.0, dead_zone=0.5, group_size=group_size, block_size=8,
    )  # fmt: skip
    blocks = torch.tensor([[5, 0], [1, 4], [3, 2]])
    mixed = pack(x, dataclasses.replace(fitted, bits=(3, 8, 4)), **kwargs)
    for head, bits in enumerate((3, 8, 4)):
        alone = pack(x, dataclasses.replace(fitted, bits=(bits,) * 3), **kwargs)
        assert torch.equal(unpack_blocks(mixed, blocks)[head], unpack_blocks(alone, blocks)[head])


def test_rotation_gathers_energy_and_is_incremental():
    x = states(n=500)
    at_once, in_parts = Moments.of(x), Moments(3, 64)
    for part in x.split(77, dim=1):
        in_parts.add(part)
    torch.testing.assert_close(
        at_once.products, in_parts.products, atol=1e-3, rtol=1e-4
    )  # fp32 sums of 500, in another order
    basis = fit_basis(x, num_dense=0, bits=8, step=1.0)
    rotated = basis.rotate(x)
    energy = rotated.square().sum(1)
    # int8 channels are about 0.7 % off, so neighbours of nearly equal energy may change places.
    assert (energy[:, :-1] >= energy[:, 1:] * 0.97).all()
    assert energy[:, :16].sum() > 1.5 * x.square().sum(1).topk(16).values.sum()
    assert basis.rotation.dtype == torch.int8
    # The rounded channels are inverted, not transposed: what is left is fp32, over 64 channels.
    torch.testing.assert_close(basis.rotate_back(rotated), x, atol=1e-4, rtol=0)
    query = torch.randn(3, 5, 64)
    products = basis.rotate_query(query) @ rotated.transpose(1, 2)
    torch.testing.assert_close(products, query @ x.transpose(1, 2), atol=1e-3, rtol=1e-4)
