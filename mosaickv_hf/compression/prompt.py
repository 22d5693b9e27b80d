"""A segment of a prompt before it is packed: bases of its own, as fine as its newest queries ask."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..config import MosaicKVConfig
from .compressor import Bases, fit_bases
from .rotation import Moments
from .strategy import States, adapt_steps, output_errors


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
        keys, values = self.packed
        return fit_bases(Moments.of(keys), Moments.of(values), self.config, keys.dtype)

    @cached_property
    def errors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What these steps do to the attention output, see `output_errors`; None if no query tells."""
        if self.queries is None or not self.config.adapts_steps:
            return None
        return output_errors(self.fitted, self.queries, self.before, self.packed, self.after)

    def bases(self) -> Bases:
        """With each head's steps adapted to the config's losses, where a query tells."""
        return self.fitted if self.errors is None else adapt_steps(self.fitted, self.errors, self.config)
