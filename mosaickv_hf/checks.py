"""Whether packed data are what kernels take for granted: they follow addresses and counts without looking."""

import torch

from .compression.packing import row_units, value_dtype
from .config import MosaicKVConfig
from .layer import MosaicKVLayer
from .segments import DENSE_TILE, INDEX_TILE, SPARE_BYTES, Basis, PackedSegment, PackedStates
from .sequence import SequenceStore

_MOST_OFF = 0.25


def check_layer(layer: MosaicKVLayer, name: str) -> None:
    """Checks a layer that was put together from a file.

    Raises:
        ValueError: something does not fit; the message says where and what.
    """
    if not layer.is_initialized:
        return
    _expect(len(layer.rows) == len(layer.starts) > 0, name, "rows and starts")
    dims = (layer.key_head_dim, layer.value_head_dim)
    _expect(all(_is_count(n, 1) for n in (layer.num_key_value_heads, *dims)), name, "numbers of heads and channels")
    seen: set[int] = set()
    for i, (row, start) in enumerate(zip(layer.rows, layer.starts)):
        where = f"{name}, row {i}"
        empty = start is None and row.length == 0 and _is_count(layer.stored_length)
        _expect(empty or (_is_count(start) and start + row.length == layer.stored_length), where, "length")
        _check_row(row, layer, where, seen)
    if layer.queries is not None:
        shape = layer.queries.shape
        whole = len(shape) == 5 and shape[:2] == (len(layer.rows), layer.num_key_value_heads) and shape[4] == dims[0]
        _expect(whole and shape[2] > 0 and shape[3] <= layer.config.query_window, name, "queries")
        _expect(layer.queries.dtype == layer.raw_dtype, name, "dtype of queries")


def _check_row(row: SequenceStore, layer: MosaicKVLayer, where: str, seen: set[int]) -> None:
    raw = [row.sinks] if row.sinks is not None else []
    raw += [row.buffer.states()] if row.buffer.tensors() else []
    raw += [] if row.open is None else row.open.raw
    for keys, values in raw:
        for part, head_dim in ((keys, layer.key_head_dim), (values, layer.value_head_dim)):
            fits = part.shape == (layer.num_key_value_heads, keys.shape[1], head_dim) and part.dtype == layer.raw_dtype
            _expect(fits, where, "raw tokens")
    _expect(bool(row.buffer.tensors()) >= (row.length > 0), where, "buffer")
    _expect((row.sinks is None) <= (not row.segments), where, "sinks")
    outcomes = [closed.ticket.outcome for closed in row.closed]
    for segment in (*row.segments, *outcomes):
        if id(segment) not in seen:
            check_segment(segment, layer, where)
            seen.add(id(segment))
    _expect(len({id(closed.provisional) for closed in row.closed}) == len(row.closed), where, "closed segments")
    for closed, outcome in zip(row.closed, outcomes):
        known = closed.provisional in row.segments and outcome.length == closed.provisional.length
        _expect(known and _is_count(closed.due), where, "closed segments")
    if row.open is not None:
        last = row.segments[-1] if row.segments else None
        fits = last is not None and row.open.bases == (last.keys.basis, last.values.basis)
        fits = fits and row.open.length == last.length == last.keys.num_blocks * last.block_size
        fits = fits and sum(keys.shape[1] for keys, _ in row.open.raw) in (0, row.open.length)
        _expect(fits, where, "open segment")


def check_segment(segment: PackedSegment, layer: MosaicKVLayer, where: str) -> None:
    """Checks one segment of a layer; raises as `check_layer`."""
    config, heads = layer.config, layer.num_key_value_heads
    blocks = segment.keys.bitmap.shape[1] // config.block_size if segment.keys.bitmap.ndim == 3 else 0
    _expect(_is_count(segment.length, 1) and segment.length <= blocks * config.block_size, where, "segment length")
    for kind, states, head_dim in (
        ("key", segment.keys, layer.key_head_dim),
        ("value", segment.values, layer.value_head_dim),
    ):
        _check_states(states, kind, (heads, blocks, head_dim), config, layer.raw_dtype, f"{where}, {kind}s")
    means, scale = segment.block_means, segment.mean_scale
    wanted = config.block_index == "mean" and config.token_ratio < 1
    _expect((means is not None) == (scale is not None) == wanted, where, "block means")
    if wanted:
        channels = min(config.index_channels, layer.key_head_dim)
        shape = (heads, -(-blocks // INDEX_TILE), channels, INDEX_TILE)
        _expect(means.shape == shape and means.dtype == torch.int8, where, "block means")
        _expect(scale.shape == (heads, channels) and scale.dtype == torch.float32, where, "scales of block means")


def _check_states(
    states: PackedStates,
    kind: str,
    sizes: tuple[int, int, int],
    config: MosaicKVConfig,
    raw_dtype: torch.dtype,
    where: str,
) -> None:
    heads, blocks, head_dim = sizes
    dense = config.dense_channels(kind, head_dim)
    size = config.block_size
    counts = _is_count(states.head_dim) and _is_count(states.group_size)
    fits = counts and (states.head_dim, states.group_size) == (head_dim, config.group_size)
    _expect(fits, where, "head_dim or group_size")
    _check_basis(states.basis, heads, head_dim, dense, config, where)
    groups = (head_dim - dense) // config.group_size
    codes = blocks * -(-size // DENSE_TILE) * sum(map(sum, states.basis.dense_bits))
    for name, shape, dtype in (
        ("dense", (codes + SPARE_BYTES,), torch.uint8),
        ("bitmap", (heads, blocks * size, -(-groups // 8)), torch.uint8),
        ("offsets", (heads, blocks), torch.int32),
    ):
        tensor = getattr(states, name)
        _expect(tensor.shape == shape and tensor.dtype == dtype, where, name)
    beyond = states.bitmap[..., -1] >> (groups - 1) % 8 >> 1 if groups else states.bitmap
    _expect(not beyond.any(), where, "bits beyond the last channel in the bitmap")
    bits = states.basis.bits
    _expect(states.values.ndim == 1 and states.values.dtype == value_dtype(bits[0], raw_dtype), where, "values")
    units = row_units(states.bitmap, bits, config.group_size).view(heads, blocks, size).sum(-1).flatten()
    ends = units.cumsum(0)
    same = torch.equal((ends - units).view(heads, blocks), states.offsets.long())
    _expect(same and states.values.numel() == (int(ends[-1]) if len(ends) else 0), where, "offsets or number of values")


def _check_basis(basis: Basis, heads: int, head_dim: int, dense: int, config: MosaicKVConfig, where: str) -> None:
    _expect(all(_is_count(bits) for bits in basis.bits), where, "bits")
    quantized = len(basis.bits) == heads and all(bits in (2, 3, 4, 8) for bits in basis.bits)
    plain = basis.bits in ((16,) * heads, (32,) * heads)
    _expect(quantized or (plain and config.selection == "top_r"), where, "bits")
    widths = basis.dense_bits
    good = len(widths) == heads and all(len(row) == dense for row in widths)
    _expect(good and all(_is_count(bits, 1) and bits <= 8 for row in widths for bits in row), where, "dense bits")
    _expect((basis.rotation is None) == (basis.rotation_scale is None) == (not config.rotate), where, "rotation")
    shapes = [("offset", (heads, dense)), ("scale", (heads, dense)), ("step", (heads,))]
    if config.rotate:
        rotation = basis.rotation
        _expect(rotation.shape == (heads, head_dim, head_dim) and rotation.dtype == torch.int8, where, "rotation")
        shapes.append(("rotation_scale", (heads, head_dim)))
    for name, shape in shapes:
        tensor = getattr(basis, name)
        good = tensor.shape == shape and tensor.dtype == torch.float32 and bool(tensor.isfinite().all())
        _expect(good, where, name)
    if config.rotate:
        axes = basis.axes()
        # Rounded eigenvectors are off by a hundredth; tokens to come could not be rotated by any matrix.
        off = axes.transpose(-1, -2) @ axes - torch.eye(head_dim, device=axes.device)
        _expect(bool(off.abs().max() < _MOST_OFF), where, "rotation")


def _is_count(n, minimum: int = 0) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= minimum


def _expect(fits: bool, where: str, what: str) -> None:
    if not fits:
        raise ValueError(f"{where}: {what} cannot be right")
