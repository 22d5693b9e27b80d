"""One sequence's tokens in one layer: raw sinks | packed segments | raw buffer, oldest first."""

import dataclasses

import torch

from .compression import Moments, States, adapt_steps, compress, fit_bases
from .config import MosaicKVConfig
from .segments import PackedSegment

# Tokens of room that a full buffer gets: few, since their bytes count, yet enough that most appends copy nothing.
_ROOM = 16


class RawBuffer:
    """The newest tokens as they came, in buffers that grow by a few tokens at a time: they stay short."""

    def __init__(self):
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.length = 0

    def states(self) -> States:
        """Views of what is held, valid until the next change; only of a buffer that was appended to."""
        return self._keys[:, : self.length], self._values[:, : self.length]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds copies of `[num_kv_heads, n, head_dim]` states."""
        needed = self.length + keys.shape[1]
        self._keys = _writable(self._keys, keys, self.length, needed)
        self._values = _writable(self._values, values, self.length, needed)
        self._keys[:, self.length : needed] = keys
        self._values[:, self.length : needed] = values
        self.length = needed

    def take(self, count: int) -> States:
        """Removes and returns the oldest `count` tokens."""
        taken = tuple(states[:, :count] for states in self.states())
        rest = [states[:, count:].clone() for states in self.states()]
        # New buffers: a long prompt's are freed as soon as the taken part is packed.
        self._keys = self._values = None
        self.length = 0
        self.append(*rest)
        return taken

    def crop(self, count: int) -> None:
        """Removes the newest `count` tokens."""
        self.length -= count

    def copy(self) -> "RawBuffer":
        """A buffer of its own with the same tokens."""
        other = RawBuffer()
        other.append(*self.states())
        return other

    def tensors(self) -> list[torch.Tensor]:
        """The buffers as allocated, room to grow included."""
        return [t for t in (self._keys, self._values) if t is not None]


def _writable(buffer: torch.Tensor | None, like: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    """`buffer`, or a larger copy, with room for `needed` tokens, that may be written in the current mode."""
    if buffer is None:
        return like.new_empty(like.shape[0], needed, like.shape[2])
    # A buffer made under torch.inference_mode cannot be written outside of it.
    frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
    if needed <= buffer.shape[1] and not frozen:
        return buffer
    larger = buffer.new_empty(buffer.shape[0], needed + _ROOM, buffer.shape[2])
    larger[:, :used] = buffer[:, :used]
    return larger


class SequenceStore:
    """Tokens of one sequence. Segments and sinks never change, so copies share them.

    Attributes:
        sinks: the first tokens, raw; None until the first segment is packed.
        segments: packed tokens, oldest first.
        buffer: the newest tokens, raw.
    """

    def __init__(self):
        self.sinks: States | None = None
        self.segments: list[PackedSegment] = []
        self.buffer = RawBuffer()

    @property
    def packed_length(self) -> int:
        return sum(segment.length for segment in self.segments)

    @property
    def length(self) -> int:
        sinks = 0 if self.sinks is None else self.sinks[0].shape[1]
        return sinks + self.packed_length + self.buffer.length

    def ripe(self, config: MosaicKVConfig, prompt: bool, phase: int = 0) -> int:
        """Tokens of the buffer that are to be packed now, oldest first, not counting sinks; 0 for none.

        Args:
            prompt: whether more of the prompt may come. Then tokens wait until there are enough for a segment with
                a rotation of its own; otherwise until `buffer_tokens` have come together.
            phase: multiple of block_size below `buffer_tokens`. The number of packed tokens is kept at this modulo
                `buffer_tokens`, so that layers of different phase pack at different decode steps.
        """
        if self.sinks is None and self.length < config.min_length:
            return 0
        waiting = self.buffer.length - config.recent_window - (config.sink_tokens if self.sinks is None else 0)
        waiting = min(waiting, config.segment_length)
        waiting -= waiting % config.block_size
        if prompt:
            return waiting if waiting >= max(config.min_segment_length, 1) else 0
        if waiting >= config.buffer_tokens:
            return waiting
        return max(0, waiting - (self.packed_length + waiting - phase) % config.buffer_tokens)

    def pack(self, count: int, config: MosaicKVConfig, queries: torch.Tensor | None = None) -> None:
        """Packs the buffer's oldest `count` tokens, behind the sinks, which are set aside first.

        Args:
            queries: `[num_kv_heads, group, n, head_dim]` of the newest tokens, multiplied by the softmax scale, to
                measure with what loss each head can be packed; None if they have not been seen.
        """
        if self.sinks is None:
            self.sinks = tuple(states.clone() for states in self.buffer.take(config.sink_tokens))
        keys, values = self.buffer.take(count)
        last = self.segments[-1] if self.segments else None
        if last is None or count >= config.min_segment_length:
            bases = fit_bases(_moments(keys), _moments(values), config)
            if queries is not None and config.adapts_steps:
                bases, config = adapt_steps(bases, queries, self.sinks, (keys, values), self.buffer.states(), config)
        else:
            bases = last.keys.basis, last.values.basis
            if config.adapts_steps:
                config = dataclasses.replace(config, key_bits=last.keys.bits, value_bits=last.values.bits)
        segment = compress(keys, values, bases, config)
        # Tokens packed as they are generated join up, so that their segments stay few; never with a long prompt's,
        # which would be copied over and over.
        short = last is not None and last.length + count <= max(config.min_segment_length, config.buffer_tokens)
        if short and last.can_extend(*bases):
            self.segments[-1] = PackedSegment.join([last, segment])
        else:
            self.segments.append(segment)

    def crop(self, count: int) -> None:
        """Removes the newest `count` tokens, at most `length`."""
        from_buffer = min(count, self.buffer.length)
        self.buffer.crop(from_buffer)
        count -= from_buffer
        while count and self.segments:
            last = self.segments.pop()
            if last.length > count:
                self.segments.append(last.crop(count))
            count -= min(count, last.length)
        if count and self.sinks is not None:
            # Fewer tokens than sinks are left: they go back to the buffer, as if no segment had ever been packed.
            self.buffer.append(*(states[:, : states.shape[1] - count] for states in self.sinks))
            self.sinks = None

    def equals(self, other: "SequenceStore") -> bool:
        """Whether both hold the same tokens, bit for bit, and share what is packed of them."""
        same_past = self.sinks is other.sinks and self.segments == other.segments
        if not same_past or self.buffer.length != other.buffer.length:
            return False
        return all(torch.equal(ours, theirs) for ours, theirs in zip(self.buffer.states(), other.buffer.states()))

    def follow(self, twin: "SequenceStore") -> None:
        """Packs as `twin` just did, which was equal before: shares its sinks and segments."""
        self.buffer.take(self.buffer.length - twin.buffer.length)
        self.sinks, self.segments = twin.sinks, list(twin.segments)

    def copy(self) -> "SequenceStore":
        """A sequence that can go another way from here."""
        other = SequenceStore()
        other.sinks, other.segments, other.buffer = self.sinks, list(self.segments), self.buffer.copy()
        return other


def _moments(states: torch.Tensor) -> Moments:
    heads, _, head_dim = states.shape
    return Moments(heads, head_dim, states.device).add(states)
