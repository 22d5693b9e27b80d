"""One model layer of a `MosaicKVCache`: a batch of sequences behind Transformers' cache layer interface."""

from collections.abc import Iterator

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .attention.dispatch import attend
from .attention.handle import Handle
from .compression import Bases, Prompt, unpack_blocks
from .config import MosaicKVConfig
from .precision import outside_autocast
from .reorganizer import Reorganizer
from .sequence import SequenceStore


def _crops_to_positive_length() -> bool:
    """Whether `DynamicCache.crop(n)` of this Transformers takes n > 0 as the length to keep (before about 5.20)."""
    try:
        DynamicLayer().crop(1)
    except ValueError:
        return False
    return True


def make_reorganizer(config: MosaicKVConfig) -> Reorganizer:
    """What does the work on closed segments as the config says."""
    return Reorganizer(config.reorganizer_threads, background=config.reorganize == "async")


class MosaicKVLayer(CacheLayerMixin):
    """Tokens of a batch in one layer.

    `update` stores nothing yet and returns handles: the call that attends to them sees the mask, which tells where
    each row's first real token is. Then the new tokens join their rows, without padding, and what is old enough is
    packed. A compiled model breaks its graph around these calls.

    Attributes:
        rows: one `SequenceStore` per batch row. Rows with the same past share its segments.
        starts: per row, the position of its first real token; None while it has none.
        stored_length: tokens in the rows, padding included; those of an `update` join them when they are attended to.
        raw_dtype: of tokens that are not packed; float64 is not kept.
        queries: `[batch_size, num_kv_heads, group, query_window, head_dim]`, the newest queries, multiplied by the
            softmax scale; None if there are none, or if they serve nothing any more.
        reorganizer: does the work on closed segments; shared by the layers of a cache.
        swaps: segments that the reorganizer has replaced.
        materializations: times that a stored K or V was expanded to a dense tensor for an operation we do not know.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, config: MosaicKVConfig, index: int = 0, reorganizer: Reorganizer | None = None):
        super().__init__()
        self.config = config
        self.reorganizer = reorganizer or make_reorganizer(config)
        self.index = index
        # Layers take turns at packing what is generated, so that no single decode step packs all of them.
        self._phase = index * config.block_size % config.buffer_tokens
        self.rows: list[SequenceStore] = []
        self.starts: list[int | None] = []
        self.materializations = 0
        self.swaps = 0
        self.stored_length = 0
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.queries: torch.Tensor | None = None

    # What a forward pass calls

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, key_head_dim = key_states.shape
        self._initialize(key_states.dtype, key_states.device, heads, key_head_dim, value_states.shape[-1])
        self.rows = [SequenceStore() for _ in range(batch)]
        self.starts = [None] * batch

    def _initialize(
        self, dtype: torch.dtype, device: torch.device, heads: int, key_head_dim: int, value_head_dim: int
    ) -> None:
        self.dtype, self.device = dtype, device
        native = torch.float32 if dtype == torch.float64 else dtype
        self.raw_dtype = torch.bfloat16 if self.config.raw_bits == 16 and dtype.itemsize > 2 else native
        self.num_key_value_heads = heads
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        self.is_initialized = True

    @torch.compiler.disable
    @outside_autocast
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Handle, Handle]:
        """Takes the new tokens' K and V, returns handles on all tokens' K and V.

        Args:
            key_states, value_states: `[batch_size, num_kv_heads, n, head_dim]`.

        Returns:
            two `Handle`s of the logical shape `[batch_size, num_kv_heads, length, head_dim]`.

        Raises:
            ValueError: the states do not go with those before; the cache is as it was.
        """
        self._check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settle()
        self.swaps += len({new for sequence in self.rows for new in sequence.swap(self.reorganizer)})
        n = key_states.shape[2]
        # A long chunk may be followed by more of the prompt; a short one is a decode step or draft tokens.
        self._pack_ripe(prompt=n > self.config.recent_window)
        self._pending = (key_states.detach(), value_states.detach())
        return Handle.pair(self, n, (key_states, value_states), is_first=self.stored_length == 0)

    @torch.compiler.disable
    @outside_autocast
    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float, num_queries: int) -> torch.Tensor:
        """Attention of the newest tokens' queries to every token, packed and raw.

        Args:
            query: `[batch_size, num_heads, num_queries, head_dim]`, or for one query token with the heads of a group
                in the third dimension, `[batch_size, num_kv_heads, group, head_dim]`.
            mask: broadcastable to the attention weights; bool or additive float; None if all is visible.
            scale: of the logits.
            num_queries: tokens of the call.

        Returns:
            query's shape and dtype, with the values' head_dim.
        """
        batch, heads = query.shape[0], self.num_key_value_heads
        group = query.shape[1] * query.shape[2] // (heads * num_queries)
        mask = grouped_mask(mask, heads, group, num_queries, self.get_seq_length())
        self.settle(mask)
        if mask is None and num_queries > 1:
            mask = self._causal_mask(num_queries)
        grouped = query.detach().reshape(batch, heads, group, num_queries, query.shape[-1])
        self._observe(grouped, scale)
        grouped = grouped.float() * scale
        output = query.new_zeros(*query.shape[:-1], self.value_head_dim)
        for row, (sequence, start) in enumerate(zip(self.rows, self.starts)):
            if start is not None:
                seen = None if mask is None else mask[row % mask.shape[0], ..., start:]
                output[row] = attend(grouped[row], sequence, seen, self.config).reshape(output.shape[1:])
        self._pack_after(num_queries)
        return output

    @torch.compiler.disable
    @outside_autocast
    def finish_prompt(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float, num_queries: int) -> None:
        """Stores the first call's tokens, which were attended to as they are, and packs what is due.

        Args:
            query, mask, scale, num_queries: as for `attend`.
        """
        # Which heads see what is of no interest here, only where each row begins: the first head tells.
        self.settle(None if mask is None else mask[(None,) * (4 - mask.ndim)][:, :1, None])
        shape = (query.shape[0], self.num_key_value_heads, -1, num_queries, query.shape[-1])
        self._observe(query.detach().reshape(shape), scale)
        self._pack_after(num_queries)

    def settle(self, mask: torch.Tensor | None = None) -> None:
        """Stores the tokens of the last `update`, if that has not been done.

        Args:
            mask: `[batch_size or 1, ..., n, length]` of the call, to find each row's first real token.
        """
        if self._pending is None:
            return
        keys, values = (states.to(self.raw_dtype) for states in self._pending)
        n = keys.shape[2]
        first_real = self._first_real(mask, n)
        for row, sequence in enumerate(self.rows):
            skip = 0
            if self.starts[row] is None:
                skip = first_real[row]
                if skip < n:
                    self.starts[row] = self.stored_length + skip
            if skip < n:
                sequence.buffer.append(keys[row, :, skip:], values[row, :, skip:])
        self.stored_length += n
        self._pending = None

    @torch.compiler.disable
    @outside_autocast
    def materialize(self, kind: str) -> torch.Tensor:
        """Dense `[batch_size, num_kv_heads, length, head_dim]` K (`"key"`) or V, zero at padding."""
        self.settle()
        head_dim = self.key_head_dim if kind == "key" else self.value_head_dim
        shape = (len(self.rows), self.num_key_value_heads, self.stored_length, head_dim)
        dense = torch.zeros(shape, dtype=self.dtype, device=self.device)
        largest = torch.finfo(self.dtype).max
        for row, sequence in enumerate(self.rows):
            place = self.starts[row] or 0
            for part in _dense_parts(sequence, kind):
                # What is off by a quantization step may be beyond fp16.
                dense[row, :, place : place + part.shape[1]] = part.to(self.dtype).clamp(-largest, largest)
                place += part.shape[1]
        return dense

    @property
    def keys(self) -> torch.Tensor | None:
        """All tokens' K as a dense tensor, for models that read it themselves; None before the first update."""
        return self._read("key")

    @property
    def values(self) -> torch.Tensor | None:
        """All tokens' V, as `keys`."""
        return self._read("value")

    @keys.setter
    def keys(self, states: None) -> None:
        self._refuse("keys", states)

    @values.setter
    def values(self, states: None) -> None:
        self._refuse("values", states)

    @torch.compiler.disable
    def _read(self, kind: str) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        self.materializations += 1
        return self.materialize(kind)

    @staticmethod
    def _refuse(name: str, states: torch.Tensor | None) -> None:
        # Transformers' base class sets None in the beginning.
        if states is not None:
            raise AttributeError(f"`{name}` of a MosaicKVCache's layer cannot be set: use update(), crop() or reset()")

    # Lengths

    def get_seq_length(self) -> int:
        """Logical length: tokens seen, padding included."""
        return self.stored_length + (0 if self._pending is None else self._pending[0].shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if isinstance(query_length, torch.Tensor):  # `cache_position` in older Transformers
            query_length = query_length.shape[0]
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older Transformers

    # What changes the batch or the past

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens, packed ones too. Up to `recent_window` tokens leave no trace.

        Args:
            tokens_to_remove: negative or zero, as for `DynamicCache.crop`.

        Raises:
            ValueError: positive where `DynamicCache` refuses that, or more than there are; the layer is as it was.
        """
        count = self.check_crop(tokens_to_remove)
        if count == 0 or not self.is_initialized:
            return
        self.settle()
        self.stored_length -= count
        if self.queries is not None:
            self.queries = self.queries[..., :-count, :] if count < self.queries.shape[3] else None
        for row, sequence in enumerate(self.rows):
            sequence.crop(min(count, sequence.length))
            if sequence.length == 0:
                self.starts[row] = None

    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that `crop` would remove; raises what it would raise."""
        length = self.get_seq_length()
        if tokens_to_remove > 0 and self.is_initialized:
            if not _crops_to_positive_length():
                raise ValueError(
                    f"`tokens_to_remove` must be zero or negative, got {tokens_to_remove}: "
                    "a negative number removes that many of the newest tokens"
                )
            return max(0, length - tokens_to_remove)
        if self.is_initialized and -tokens_to_remove > length:
            raise ValueError(f"`tokens_to_remove` is {tokens_to_remove}, but the cache holds {length} tokens")
        return -tokens_to_remove

    def reset(self) -> None:
        """Forgets all tokens, and what the first ones settled: batch size, heads, dtype, device."""
        self.__init__(self.config, self.index, self.reorganizer)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Makes row i what row `indices[i]` was; packed segments are shared, not copied."""
        if not self.is_initialized:
            return
        self.settle()
        picked = torch.arange(len(self.rows))[indices.cpu() if isinstance(indices, torch.Tensor) else indices].tolist()
        used: set[int] = set()
        rows = []
        for row in picked:
            rows.append(self.rows[row].copy() if row in used else self.rows[row])
            used.add(row)
        self.rows, self.starts = rows, [self.starts[row] for row in picked]
        self.queries = None if self.queries is None else self.queries[picked]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times; packed segments are shared, not copied."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    @outside_autocast
    def fill(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: list[int | None],
        queries: torch.Tensor | None = None,
    ) -> None:
        """Stores and packs a finished prompt in an empty layer.

        Args:
            keys, values: `[batch_size, num_kv_heads, length, head_dim]`.
            starts: per row, the position of its first real token; None if it has none.
            queries: as the attribute; of more than `query_window` the newest are taken.
        """
        self._check(keys, values)
        self.lazy_initialization(keys, values)
        self.starts = list(starts)
        self.queries = None if queries is None else queries[..., -self.config.query_window :, :]
        for row, (sequence, start) in enumerate(zip(self.rows, starts)):
            if start is not None:
                real = (states[row, :, start:].detach().to(self.raw_dtype) for states in (keys, values))
                sequence.buffer.append(*real)
        self.stored_length = keys.shape[2]
        self._pack_ripe(prompt=True)
        self._pack_ripe(prompt=False)

    def waiting(self) -> dict[int, list[Prompt]]:
        """What waits to be packed until the cache has fitted its `memory_budget`: by row, a prompt for each segment.

        Of rows that are equal only the first is there.
        """
        self.settle()
        found = {}
        for row, *_ in self._ripe_families(prompt=False, waiting=True):
            count, longest = self._count(row, prompt=False), self.config.segment_length
            queries = None if self.queries is None else self.queries[row]
            found[row] = [
                self.rows[row].prompt(min(longest, count - skip), self.config, queries, skip)
                for skip in range(0, count, longest)
            ]
        return found

    def pack_waiting(self, bases: dict[int, list[Bases]]) -> None:
        """Packs what has been waiting, with these bases for its segments, by row as in `waiting`."""
        for row, *twins in self._ripe_families(prompt=False, waiting=True):
            if row in bases:
                self._pack([row, *twins], self._count(row, prompt=False), bases[row])
        self._forget_queries()

    def restore(
        self,
        rows: list[SequenceStore],
        starts: list[int | None],
        stored_length: int,
        queries: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        num_key_value_heads: int,
        head_dims: tuple[int, int],
    ) -> None:
        """Makes an empty layer what another one was, whose attributes these are; the head_dims are K's and V's."""
        self._initialize(dtype, device, num_key_value_heads, *head_dims)
        self.rows, self.starts, self.stored_length, self.queries = rows, starts, stored_length, queries

    def _observe(self, grouped: torch.Tensor, scale: float) -> None:
        """Keeps the newest queries while they may serve a segment; `[batch_size, num_kv_heads, group, n, head_dim]`."""
        if self._wants_queries(prompt=grouped.shape[3] > self.config.recent_window):
            newest = (grouped[..., -self.config.query_window :, :] * scale).to(self.raw_dtype)
            if self.queries is not None:
                newest = torch.cat([self.queries, newest], dim=3)[..., -self.config.query_window :, :]
            self.queries = newest

    def _pack_after(self, num_queries: int) -> None:
        # At once after a long chunk, so that no layer waits with a raw prompt for the next call.
        if num_queries > self.config.recent_window:
            self._pack_ripe(prompt=True)

    def _pack_ripe(self, prompt: bool) -> None:
        """Packs what is due in every row; rows that are equal up to there (beams of one prompt) are packed once."""
        for rows in self._ripe_families(prompt, waiting=False):
            self._pack(rows, self._count(rows[0], prompt))
        self._forget_queries()

    def _pack(self, rows: list[int], count: int, bases: list[Bases] | None = None) -> None:
        """Packs the oldest `count` tokens of rows that are equal, in segments; `bases` are theirs, if there are any."""
        first, *twins = (self.rows[row] for row in rows)
        queries = None if self.queries is None else self.queries[rows[0]]
        found = iter(bases or [])
        while count:
            length = min(count, self.config.segment_length)
            first.pack(length, self.config, queries, self.reorganizer, next(found, None))
            for twin in twins:
                twin.follow(first)
            count -= length

    def _count(self, row: int, prompt: bool) -> int:
        """Tokens of a row that are to be packed."""
        return self.rows[row].ripe(self.config, prompt, self._phase)

    def _ripe_families(self, prompt: bool, waiting: bool) -> list[list[int]]:
        """Rows with something to pack, those that are equal together.

        Args:
            waiting: those that wait for the cache to fit its `memory_budget`, or all others.
        """
        families: list[list[int]] = []
        for row, sequence in enumerate(self.rows):
            count = self._count(row, prompt)
            waits = self.config.memory_budget is not None and sequence.needs_bases(count, self.config)
            if count and waits == waiting:
                family = next((f for f in families if self.rows[f[0]].equals(sequence)), None)
                if family is None:
                    families.append([row])
                else:
                    family.append(row)
        return families

    def _forget_queries(self) -> None:
        if not self._wants_queries(prompt=False) and not self._ripe_families(prompt=False, waiting=True):
            self.queries = None

    def _wants_queries(self, prompt: bool) -> bool:
        """Whether segments to come are packed as queries ask; `prompt` tells whether more of one may come."""
        if self.config.reorganize != "off":
            return True
        return self.config.adapts_steps and (prompt or not all(sequence.segments for sequence in self.rows))

    def _causal_mask(self, n: int) -> torch.Tensor:
        """bool `[1, 1, 1, n, length]` for the newest n tokens, where no mask came with them."""
        positions = torch.arange(self.stored_length, device=self.device)
        return (positions <= positions[-n:, None])[None, None, None]

    def _first_real(self, mask: torch.Tensor | None, n: int) -> list[int]:
        """Per row, which of the n newest tokens is its first real one (n: none), from what tokens see themselves."""
        if mask is None or all(start is not None for start in self.starts):
            return [0] * len(self.rows)
        newest = mask[:, 0, 0, :, self.stored_length :]
        own = newest.diagonal(dim1=-2, dim2=-1) if newest.shape[1] == n else newest[:, 0]
        visible = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
        first = torch.where(visible.any(-1), visible.to(torch.uint8).argmax(-1), n)
        return first.expand(len(self.rows)).tolist()

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises `ValueError` if K and V do not go with each other or with what is stored."""
        given = {"key_states": keys, "value_states": values}
        for name, states in given.items():
            if states.ndim != 4:
                raise ValueError(f"`{name}` must have 4 dimensions [batch, heads, length, head_dim], got {states.ndim}")
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"`value_states` must have key_states' batch size, heads and length {list(keys.shape[:3])}, "
                f"got {list(values.shape[:3])}"
            )
        if not self.is_initialized:
            return
        head_dims = {"key_states": self.key_head_dim, "value_states": self.value_head_dim}
        for name, states in given.items():
            for what, got, allowed in (
                ("batch size", states.shape[0], len(self.rows)),
                ("number of heads", states.shape[1], self.num_key_value_heads),
                ("head_dim", states.shape[3], head_dims[name]),
                ("dtype", states.dtype, self.dtype),
                ("device", states.device, self.device),
            ):
                if got != allowed:
                    raise ValueError(f"`{name}` must have the {what} of the tokens in the cache, {allowed}, got {got}")


def grouped_mask(
    mask: torch.Tensor | None, heads: int, group: int, num_queries: int, length: int
) -> torch.Tensor | None:
    """A mask for attention weights as `[batch or 1, heads or 1, group or 1, num_queries or 1, length]`.

    Args:
        mask: up to 4 dimensions, broadcastable to `[batch, heads * group, num_queries, length]`, or, where the heads
            of a group came in the query dimension of one token, to `[batch, heads, group, length]`.

    Raises:
        ValueError: another shape.
    """
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask
    batch, mask_heads, queries, mask_length = mask.shape
    if mask_length == length:
        if mask_heads == 1 and queries in (1, num_queries):
            return mask[:, :, None]
        if mask_heads == heads * group and queries in (1, num_queries):
            return mask.reshape(batch, heads, group, queries, length)
        if num_queries == 1 and mask_heads in (1, heads) and queries == group:
            return mask[:, :, :, None]
    raise ValueError(
        f"`attn_mask` must broadcast to [batch, {heads * group}, {num_queries}, {length}], got {list(mask.shape)}"
    )


def _dense_parts(sequence: SequenceStore, kind: str) -> Iterator[torch.Tensor]:
    """K or V of a sequence in order, `[num_kv_heads, n, head_dim]` each."""
    which = 0 if kind == "key" else 1
    if sequence.sinks is not None:
        yield sequence.sinks[which]
    for segment in sequence.segments:
        packed = segment.keys if kind == "key" else segment.values
        blocks = torch.arange(segment.num_blocks, device=packed.bitmap.device).expand(packed.bitmap.shape[0], -1)
        yield packed.basis.rotate_back(unpack_blocks(packed, blocks))[:, : segment.length]
    if sequence.buffer.length:
        yield sequence.buffer.states()[which]
