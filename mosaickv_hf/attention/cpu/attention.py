"""`attend` on CPU: what `attention.reference.attend` does, by compiled kernels on the packed data."""

import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...config import MosaicKVConfig
from ..selection import num_chosen_blocks
from . import fields as f
from . import scoring, softmax
from .threads import run

if TYPE_CHECKING:
    from ...sequence import SequenceStore

# Query rows that share an unpacked tile: enough that unpacking costs little, few enough for the second-level cache.
_CHUNK_ROWS = 128
# Blocks scored as one work item, a multiple of the mean index' tile.
_RANGE_BLOCKS = 1024
# Work items for each thread, so that none waits long for the last.
_ITEMS_PER_THREAD = 4
_FEW_ROWS = 64


class _Plan:
    """What calls on a sequence have in common until its segments or sinks change.

    Attributes:
        sources: table of sinks, segments and, last, room for the raw buffer.
        key_bases, value_bases: tables of the distinct bases; the first is the raw tokens'.
        ranges: table of the block ranges that are scored as one work item.
    """

    def __init__(self, sequence: "SequenceStore"):
        self.segments, self.sinks = list(sequence.segments), sequence.sinks
        self.packed_length = sequence.packed_length
        keys, values = sequence.buffer.states()
        places = {"key": {None: 0}, "value": {None: 0}}
        bases = {"key": [f.plain_basis(keys.shape[2])], "value": [f.plain_basis(values.shape[2])]}
        self.held, rows, ranges = [], [], []
        self.num_blocks = token = 0
        if self.sinks is not None:
            self._sinks = f.RawFields(*self.sinks)
            rows.append(self._sinks.table.copy())
            token = self.sinks[0].shape[1]
        self.first_segment = len(rows)
        for segment in self.segments:
            fields = f.of_segment(segment)
            self.held.append(fields)
            row = fields.table.copy()
            for kind, states, table, first in zip(
                ("key", "value"), (segment.keys, segment.values), fields.bases, (f.C_K, f.C_V)
            ):
                name = id(states.basis)
                if name not in places[kind]:
                    places[kind][name] = len(bases[kind])
                    bases[kind].append(table)
                row[first + f.S_BASIS] = places[kind][name]
            row[f.C_FIRST_TOKEN], row[f.C_FIRST_BLOCK] = token, self.num_blocks
            for first in range(0, segment.num_blocks, _RANGE_BLOCKS):
                ranges.append((len(rows), first, min(first + _RANGE_BLOCKS, segment.num_blocks)))
            rows.append(row)
            token += segment.length
            self.num_blocks += segment.num_blocks
        self.before_buffer = token
        rows.append(np.zeros(f.SOURCE_FIELDS, dtype=np.int64))
        self.sources = np.stack(rows)
        self.key_bases, self.value_bases = np.stack(bases["key"]), np.stack(bases["value"])
        self.ranges = np.array(ranges, dtype=np.int64)
        self.value_width = max(int(self.sources[:, f.C_V + f.S_WIDTH].max()), f.whole(values.shape[2]))
        self.index_channels = int(self.sources[:, f.C_INDEX_CHANNELS].max())

    def fits(self, sequence: "SequenceStore") -> bool:
        return self.sinks is sequence.sinks and self.segments == sequence.segments


_plans: weakref.WeakKeyDictionary["SequenceStore", _Plan] = weakref.WeakKeyDictionary()
_scratch = threading.local()


def _scratch_of(size: int) -> np.ndarray:
    """Memory of this thread that is kept from call to call; its size does not depend on the context."""
    held = getattr(_scratch, "held", None)
    if held is None or held.nbytes < size:
        held = _scratch.held = np.empty(size + 64, dtype=np.uint8)
    return held


def _empty(*shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory for kernels, whatever torch's default dtype and device are."""
    return torch.empty(*shape, dtype=dtype, device="cpu")


def attend(
    query: torch.Tensor, sequence: "SequenceStore", mask: torch.Tensor | None, config: MosaicKVConfig
) -> torch.Tensor:
    """See `attention.reference.attend`."""
    plan = _plans.get(sequence)
    if plan is None or not plan.fits(sequence):
        plan = _plans[sequence] = _Plan(sequence)
    heads, group, queries, key_dim = query.shape
    rows, threads = group * queries, torch.get_num_threads()
    buffer_keys, buffer_values = sequence.buffer.states()
    value_dim = buffer_values.shape[2]
    query = query.detach().float().contiguous()

    call = np.zeros(f.CALL_FIELDS, dtype=np.int64)
    call[f.A_HEADS : f.A_ROWS + 1] = heads, group, queries, rows
    chunk = min(rows, _CHUNK_ROWS)
    chunks = -(-rows // chunk)
    call[f.A_CHUNK : f.A_QUERY + 1] = chunk, key_dim, value_dim, query.data_ptr()

    sources = plan.sources
    buffer = None
    if buffer_keys.shape[1]:
        buffer = f.RawFields(buffer_keys, buffer_values)
        sources = sources.copy()
        sources[-1] = buffer.table
        sources[-1, f.C_FIRST_TOKEN] = plan.before_buffer
    else:
        sources = sources[:-1].copy()
    call[f.A_SOURCES], call[f.A_NUM_SOURCES] = sources.ctypes.data, len(sources)
    call[f.A_KEY_BASES], call[f.A_NUM_KEY_BASES] = plan.key_bases.ctypes.data, len(plan.key_bases)
    call[f.A_VALUE_BASES], call[f.A_NUM_VALUE_BASES] = plan.value_bases.ctypes.data, len(plan.value_bases)
    width = 2 * f.whole(key_dim) + 24
    prepared = _empty(len(plan.key_bases) * heads * rows * width)
    call[f.A_PREPARED], call[f.A_PREPARED_WIDTH] = prepared.data_ptr(), width

    if mask is not None:
        if mask.dtype != torch.bool:
            mask = mask.float()
        if mask.stride(-1) != 1:
            mask = mask.contiguous()
        mask = mask.expand(heads, group, queries, mask.shape[-1])
        call[f.A_MASK : f.A_MASK_QUERY + 1] = mask.data_ptr(), mask.element_size(), *mask.stride()[:3]

    scratch_bytes = 16384 + group * (256 + 4 * key_dim) + 320 * (max(key_dim, value_dim) + 32) + 128 * chunk
    scratch_bytes = -(-scratch_bytes // 64) * 64
    scratch = _scratch_of(threads * scratch_bytes)
    call[f.A_SCRATCH], call[f.A_SCRATCH_BYTES] = scratch.ctypes.data, scratch_bytes

    # Few rows are rotated sooner than another thread has woken up.
    few = 1 if rows * heads <= _FEW_ROWS else threads
    run(scoring.prepare.address, call, few)
    blocks = plan.num_blocks
    k = num_chosen_blocks(plan.packed_length, blocks, config) if queries == 1 else blocks
    if k < blocks:
        first, count = plan.first_segment, len(plan.segments)
        sources[first : first + count, f.C_SELECTED] = np.arange(count)
        scores = _empty(heads * group * f.whole(blocks))
        sums = _empty(len(plan.ranges) * heads * group * 2)
        chosen = _empty(heads * (k + count + 1), dtype=torch.int32)
        call[f.A_SCORES : f.A_NUM_BLOCKS + 1] = scores.data_ptr(), f.whole(blocks), blocks
        call[f.A_RANGES : f.A_RANGE_SUMS + 1] = plan.ranges.ctypes.data, len(plan.ranges), sums.data_ptr()
        call[f.A_CHOSEN_COUNT : f.A_CHOSEN + 1] = k, chosen.data_ptr()
        call[f.A_CHOSEN_STARTS] = chosen.data_ptr() + 4 * heads * k
        run(scoring.score.address, call, threads)
        run(scoring.select.address, call, threads)

    parts = -(-_ITEMS_PER_THREAD * threads // (heads * chunks))
    slots = []
    for place, blocks in enumerate(sources[:, f.C_BLOCKS].tolist()):
        most = max(1, min(parts, blocks // 16))
        slots += [(place, part, most) for part in range(most)]
    slots = np.array(slots, dtype=np.int64)
    partial_width = chunk * (2 + plan.value_width)
    partials = _empty(heads * chunks * len(slots) * partial_width)
    output = _empty(heads, group, queries, value_dim)
    call[f.A_SLOTS : f.A_NUM_SLOTS + 1] = slots.ctypes.data, len(slots)
    call[f.A_PARTIALS : f.A_OUTPUT + 1] = partials.data_ptr(), partial_width, output.data_ptr()
    run(softmax.attend.address, call, threads)
    run(softmax.merge.address, call, few)
    return output
