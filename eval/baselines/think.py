"""ThinK (arXiv 2407.21018): key channels that the prompt's newest queries do not need are dropped, per head.

One mask of channels for all tokens of the prompt, by the norms of a channel over queries and over keys. The newest 32
tokens and what is generated stay whole; so does V.
"""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

CHANNEL_RATIO = 0.5
RECENT_TOKENS = 32
QUERY_WINDOW = 32


class ThinkLayer(DynamicLayer):
    """K without the dropped channels, with the precision of bf16. Returned K has zeros there: no product changes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor):
        """
        Args:
            keys, values: `[batch, num_kv_heads, length, head_dim]` of the prompt.
            queries: `[batch, num_kv_heads, group, n, head_dim]`, the prompt's newest.
        """
        super().__init__()
        keys, values = (states.bfloat16().to(states.dtype) for states in (keys, values))
        old, self.old_values = keys[:, :, :-RECENT_TOKENS], values[:, :, :-RECENT_TOKENS].clone()
        count = round(keys.shape[-1] * CHANNEL_RATIO)
        norms = queries.float().square().sum((2, 3)).sqrt() * keys.float().square().sum(2).sqrt()
        best = norms.topk(count, dim=-1).indices
        self.kept = torch.zeros(norms.shape, dtype=torch.bool, device=keys.device).scatter_(-1, best, True)
        kept = self.kept[:, :, None].expand_as(old)
        self.pruned = old[kept].view(*old.shape[:3], count)
        # What a kernel would read from `pruned`; made once, since the model's attention takes whole keys.
        self._expanded = torch.zeros_like(old).masked_scatter_(kept, self.pruned)
        super().update(keys[:, :, -RECENT_TOKENS:].clone(), values[:, :, -RECENT_TOKENS:].clone())

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = (states.bfloat16().to(states.dtype) for states in (key_states, value_states))
        keys, values = super().update(*rounded, *args, **kwargs)
        return torch.cat([self._expanded, keys], dim=2), torch.cat([self.old_values, values], dim=2)

    def get_seq_length(self) -> int:
        return self.pruned.shape[2] + super().get_seq_length()


class ThinkCache(DynamicCache):
    """A `DynamicCache` filled with a prompt, with half of its key channels."""

    def __init__(self, prompt: DynamicCache, queries: list[torch.Tensor]):
        super().__init__()
        self.layers = [ThinkLayer(layer.keys, layer.values, q) for layer, q in zip(prompt.layers, queries)]
