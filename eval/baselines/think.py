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
    """K without the dropped channels, as bf16. Returned K has zeros there, which changes no product."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor):
        """
        Args:
            keys, values: `[batch, num_kv_heads, length, head_dim]` of the prompt.
            queries: `[batch, num_kv_heads, group, n, head_dim]`, the prompt's newest.
        """
        super().__init__()
        count = round(keys.shape[-1] * CHANNEL_RATIO)
        old, recent = keys[:, :, :-RECENT_TOKENS], keys[:, :, -RECENT_TOKENS:]
        norms = queries.float().square().sum((2, 3)).sqrt() * keys.float().square().sum(2).sqrt()
        best = norms.topk(count, dim=-1).indices
        self.kept = torch.zeros(norms.shape, dtype=torch.bool, device=keys.device).scatter_(-1, best, True)
        shape = (*old.shape[:3], count)
        self.pruned = old[self.kept[:, :, None].expand_as(old)].view(shape).bfloat16()
        super().update(recent.bfloat16(), values[:, :, -RECENT_TOKENS:].bfloat16())
        self.old_values = values[:, :, :-RECENT_TOKENS].bfloat16()

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states.bfloat16(), value_states.bfloat16(), *args, **kwargs)
        old = self.pruned.new_zeros(*self.pruned.shape[:3], self.kept.shape[-1])
        old[self.kept[:, :, None].expand_as(old)] = self.pruned.flatten()
        dtype = key_states.dtype
        return torch.cat([old, keys], dim=2).to(dtype), torch.cat([self.old_values, values], dim=2).to(dtype)

    def get_seq_length(self) -> int:
        return self.pruned.shape[2] + super().get_seq_length()


class ThinkCache(DynamicCache):
    """A `DynamicCache` filled with a prompt, with half of its key channels."""

    def __init__(self, prompt: DynamicCache, queries: list[torch.Tensor]):
        super().__init__()
        self.layers = [ThinkLayer(layer.keys, layer.values, q) for layer, q in zip(prompt.layers, queries)]
