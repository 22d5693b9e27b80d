"""A segment of a prompt before it is packed: bases of its own, as fine as its newest queries ask."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..config import MosaicKVConfig
from .candidates import Candidates
from .compressor import Bases, fit_bases
from .rotation import with_steps
from .strategy import States, output_weights

# Factors of the config's steps at most where no query tells what they lose. Finer, four bits would clip.
_UNSEEN = 0.4, 4.0


@dataclass(frozen=True)
class Prompt:
    """One sequence's tokens in one layer, about to be packed.

    Attributes:
        before, packed, after: K and V `[num_kv_heads, n, head_dim]` of those that stay raw in front, of those to pack,
            and of the newest.
        queries: `[num_kv_heads, group, n, head_dim]` of the newest tokens, multiplied by the softmax scale; None if
            they have not been seen.
        config: of the cache.
    """

    before: States
    packed: States
    after: States
    queries: torch.Tensor | None
    config: MosaicKVConfig

    @cached_property
    def fitted(self) -> Bases:
        """With the config's steps for all heads."""
        return fit_bases(*self.packed, self.config)

    @cached_property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What errors in K and V do to the output, see `output_weights`; there must be queries."""
        return output_weights(self.fitted[0].axes(), self.queries, self.before, self.packed, self.after)

    @cached_property
    def candidates(self) -> tuple[Candidates, Candidates] | None:
        """Ways to quantize K and V instead; None if no query tells what they lose."""
        if self.queries is None or not self.config.adapts_steps:
            return None
        parts = zip(self.fitted, self.packed, self.weights)
        return tuple(Candidates.of(basis, states, weight, self.config) for basis, states, weight in parts)

    def bases(self, factor: float = 1.0) -> Bases:
        """As the config's losses ask of each head, where a query tells, else its steps.

        Args:
            factor: of these losses; steps, whose squares they are, follow within a range.
        """
        if self.candidates is None:
            finest, coarsest = _UNSEEN
            factor = min(max(factor**0.5, finest), coarsest)
            return tuple(with_steps(basis, basis.step * factor, basis.bits) for basis in self.fitted)
        losses = (factor * self.config.key_loss, factor * self.config.value_loss)
        parts = zip(self.candidates, self.fitted, losses)
        return tuple(candidates.choose(basis, loss) for candidates, basis, loss in parts)
