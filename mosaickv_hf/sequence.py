"""One sequence's tokens in one layer: raw sinks | packed segments | raw buffer, oldest first."""

import torch

from .compression import Bases, Prompt, Repack, States, compress
from .config import MosaicKVConfig
from .open_segment import ClosedSegment, OpenSegment
from .reorganizer import Reorganizer
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
        if self._keys is not None:
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
        open: the last segment if generated tokens still join it; None otherwise.
        closed: those of the segments that the reorganizer is at, oldest first.
        buffer: the newest tokens, raw.
    """

    def __init__(self):
        self.sinks: States | None = None
        self.segments: list[PackedSegment] = []
        self.open: OpenSegment | None = None
        self.closed: list[ClosedSegment] = []
        self.buffer = RawBuffer()

    @property
    def packed_length(self) -> int:
        return sum(segment.length for segment in self.segments)

    @property
    def length(self) -> int:
        sinks = 0 if self.sinks is None else self.sinks[0].shape[1]
        return sinks + self.packed_length + self.buffer.length

    def ripe(self, config: MosaicKVConfig, prompt: bool, phase: int = 0) -> int:
        """Tokens of the buffer that are to be packed now, oldest first, not counting sinks; 0 for none. More than
        `segment_length` make several segments.

        Args:
            prompt: whether more of the prompt may come. Then tokens wait until there are enough for a segment with
                a rotation of its own; otherwise until `buffer_tokens` have come together.
            phase: multiple of block_size below `buffer_tokens`. The number of packed tokens is kept at this modulo
                `buffer_tokens`, so that layers of different phase pack at different decode steps.
        """
        if self.sinks is None and self.length < config.min_length:
            return 0
        waiting = self.buffer.length - config.recent_window - (config.sink_tokens if self.sinks is None else 0)
        waiting -= waiting % config.block_size
        if prompt:
            return waiting if waiting >= max(config.min_segment_length, 1) else 0
        if waiting >= config.buffer_tokens:
            return waiting
        return max(0, waiting - (self.packed_length + waiting - phase) % config.buffer_tokens)

    def needs_bases(self, count: int, config: MosaicKVConfig) -> bool:
        """Whether so many tokens of the buffer would be packed with bases of their own."""
        return not self.segments or count >= config.min_segment_length

    def prompt(self, count: int, config: MosaicKVConfig, queries: torch.Tensor | None, skip: int = 0) -> Prompt:
        """`count` tokens of the buffer behind the sinks, and `skip` more, as those to pack; arguments as for `pack`.

        Raises:
            ValueError: NaN or infinity is among them, or a vector whose length overflows: packing would hide it.
        """
        first = config.sink_tokens if self.sinks is None else 0
        raw = self.buffer.states()
        before = self.sinks or tuple(states[:, :first] for states in raw)
        first += skip
        packed = tuple(states[:, first : first + count] for states in raw)
        for name, states in zip(("K", "V"), packed):
            longest = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32).max().item()
            if not longest <= torch.finfo(states.dtype).max:
                raise ValueError(
                    f"{name} of tokens to pack have NaN, infinity or a vector too long for {states.dtype} "
                    f"(the longest is {longest}): the model overflows, try another dtype"
                )
        after = tuple(states[:, first + count :] for states in raw)
        return Prompt(before, packed, after, queries, config)

    def pack(
        self,
        count: int,
        config: MosaicKVConfig,
        queries: torch.Tensor | None = None,
        reorganizer: Reorganizer | None = None,
        bases: Bases | None = None,
    ) -> None:
        """Packs the buffer's oldest `count` tokens, behind the sinks, which are set aside first.

        A prompt's tokens get bases of their own; generated ones, and a prompt's last few, borrow those before them
        and join an open segment, which is packed again when it closes.

        Args:
            queries: `[num_kv_heads, group, n, head_dim]` of the newest tokens, multiplied by the softmax scale, to
                measure with what loss each head can be packed; None if they have not been seen.
            reorganizer: gets the segments that close; None leaves them as they are.
            bases: for a prompt's tokens, if they have been found already.
        """
        prompt = self.prompt(count, config, queries)
        sinks = tuple(states.clone() for states in prompt.before) if self.sinks is None else self.sinks
        keys, values = prompt.packed
        # Nothing changes before all work is done: an error leaves the sequence as it was.
        segments, closed, open_segment = list(self.segments), list(self.closed), None
        if self.needs_bases(count, config):
            new = compress(keys, values, bases or prompt.bases(), config)
            if self.open is not None:
                closed += self._close(self.open, segments[-1], config, queries, reorganizer)
            segments.append(new)
        else:
            last = segments[-1]
            open_segment = OpenSegment((last.keys.basis, last.values.basis)) if self.open is None else self.open.copy()
            segment = compress(keys, values, open_segment.bases, config)
            # Tokens packed as they are generated join up, so that segments stay few.
            if open_segment.length:
                segments[-1] = PackedSegment.join([last, segment])
            else:
                segments.append(segment)
            open_segment.add((keys, values), segment, config)
            if open_segment.is_full(config):
                closed += self._close(open_segment, segments[-1], config, queries, reorganizer)
                open_segment = None
        self.buffer.take(count + (sinks[0].shape[1] if self.sinks is None else 0))
        self.sinks, self.segments, self.closed, self.open = sinks, segments, closed, open_segment

    def _close(
        self,
        open_segment: OpenSegment,
        segment: PackedSegment,
        config: MosaicKVConfig,
        queries: torch.Tensor | None,
        reorganizer: Reorganizer | None,
    ) -> list[ClosedSegment]:
        """Hands a segment that closes to the reorganizer, if there is one and its tokens are still there."""
        if reorganizer is None or not open_segment.raw:
            return []
        ticket = reorganizer.submit(Repack(tuple(open_segment.raw), segment, queries, config))
        return [ClosedSegment(segment, ticket, self.length + config.reorganize_lag)]

    def swap(self, reorganizer: Reorganizer) -> list[PackedSegment]:
        """Puts what the reorganizer made of closed segments in their place, as far as it is due.

        Returns:
            the segments that are new.

        Raises:
            Exception: what making it raised; the segment then stays as it is packed.
        """
        new = []
        while self.closed and self.length >= self.closed[0].due:
            closed = self.closed.pop(0)
            outcome = reorganizer.result(closed.ticket)
            if outcome is not closed.provisional:
                self.segments[self.segments.index(closed.provisional)] = outcome
                new.append(outcome)
        return new

    def crop(self, count: int) -> None:
        """Removes the newest `count` tokens, at most `length`.

        A segment that is shortened stays as it is packed: it is neither continued nor reorganized.
        """
        from_buffer = min(count, self.buffer.length)
        self.buffer.crop(from_buffer)
        count -= from_buffer
        if count:
            self.open = None
        while count and self.segments:
            last = self.segments.pop()
            if last.length > count:
                self.segments.append(last.crop(count))
            count -= min(count, last.length)
        self.closed = [closed for closed in self.closed if closed.provisional in self.segments]
        if self.sinks is not None and not self.segments:
            # At most the sinks are left: they go back to the buffer, as if no segment had ever been packed.
            self.buffer.append(*(states[:, : states.shape[1] - count] for states in self.sinks))
            self.sinks = None

    def equals(self, other: "SequenceStore") -> bool:
        """Whether both hold the same tokens, bit for bit, and share what is packed of them."""
        same_past = self.sinks is other.sinks and self.segments == other.segments and self.closed == other.closed
        same_past = same_past and (self.open is None) == (other.open is None)
        if not same_past or self.buffer.length != other.buffer.length:
            return False
        return all(torch.equal(ours, theirs) for ours, theirs in zip(self.buffer.states(), other.buffer.states()))

    def follow(self, twin: "SequenceStore") -> None:
        """Packs as `twin` just did, which was equal before: shares its sinks and segments."""
        self.buffer.take(self.buffer.length - twin.buffer.length)
        self._share(twin)

    def copy(self) -> "SequenceStore":
        """A sequence that can go another way from here."""
        other = SequenceStore()
        other.buffer = self.buffer.copy()
        other._share(self)
        return other

    def _share(self, other: "SequenceStore") -> None:
        self.sinks, self.segments, self.closed = other.sinks, list(other.segments), list(other.closed)
        self.open = None if other.open is None else other.open.copy()
