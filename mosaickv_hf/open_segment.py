"""Segments of generated tokens on their way: open, then closed and waiting for the reorganizer (paper, management)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .compression import Bases, States
from .config import MosaicKVConfig
from .reorganizer import Ticket
from .segments import PackedSegment


@dataclass
class OpenSegment:
    """Generated tokens since the last segment closed: packed with bases that they borrow, and raw.

    Attributes:
        bases: of K and V, those of the segment before.
        length: tokens.
        raw: their K and V in parts `[num_kv_heads, n, head_dim]`; parts never change, so copies share them. Empty if
            nothing will be reorganized.
        first_loss, last_loss: relative squared error of packing the first and the newest part, of K and V the larger.
    """

    bases: Bases
    length: int = 0
    raw: list[States] = field(default_factory=list)
    first_loss: float = 0.0
    last_loss: float = 0.0

    def add(self, states: States, segment: PackedSegment, config: MosaicKVConfig) -> None:
        """Takes tokens that have just been packed, and their packed form."""
        if config.reorganize != "off":
            self.last_loss = max(segment.losses)
            self.first_loss = self.first_loss or self.last_loss
            self.raw.append(tuple(part.clone() for part in states))
        self.length += states[0].shape[1]

    def is_full(self, config: MosaicKVConfig) -> bool:
        """Whether it should be closed: at its longest, or when its tokens no longer fit the borrowed bases."""
        if config.reorganize == "off":
            return self.length >= max(config.min_segment_length, config.buffer_tokens)
        return self.length >= config.open_segment_length or self.last_loss > config.segment_loss * self.first_loss

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every raw tensor held."""
        for part in self.raw:
            yield from part

    def copy(self) -> "OpenSegment":
        """One that can go another way from here."""
        return OpenSegment(self.bases, self.length, list(self.raw), self.first_loss, self.last_loss)


@dataclass(frozen=True, eq=False)
class ClosedSegment:
    """A closed segment, and what the reorganizer makes of it.

    Attributes:
        provisional: the segment as it is attended to until then.
        ticket: the work.
        due: length of the sequence at which the result takes its place, so that outputs do not depend on timing.
    """

    provisional: PackedSegment
    ticket: Ticket[PackedSegment]
    due: int

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that is held for it."""
        work, outcome = self.ticket.work, self.ticket.outcome
        if work is not None:
            yield from work.tensors()
        if outcome is not None:
            yield from (tensor for _, tensor in outcome.tensors())
