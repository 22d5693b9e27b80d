"""Quest (arXiv 2406.10774): every token is kept; a decode step attends to the pages that its query may need.

A page of 16 tokens keeps the least and the greatest value of every key channel; the query's upper bound on a page's
logits scores it. The first two layers attend to everything, as in the paper.
"""

import math

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PAGE_SIZE = 16
TOKEN_RATIO = 0.1
DENSE_LAYERS = 2
ATTENTION = "eval-quest"
"""The attention implementation a model must be set to while it decodes with `QuestCache`."""


class QuestLayer(DynamicLayer):
    """K and V with the precision of bf16, and the bounds of each full page of keys; the first layers are dense."""

    def __init__(self, index: int):
        super().__init__()
        self.dense = index < DENSE_LAYERS
        self.bounds: torch.Tensor | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = (states.bfloat16().to(states.dtype) for states in (key_states, value_states))
        keys, values = super().update(*rounded, *args, **kwargs)
        self._add_pages(keys)
        if not self.dense and key_states.shape[2] == 1:
            keys.page_bounds = self.bounds  # reaches `attend`, which is given this very tensor
        return keys, values

    def _add_pages(self, keys: torch.Tensor) -> None:
        known = 0 if self.bounds is None else self.bounds.shape[3]
        full = keys.shape[2] // PAGE_SIZE
        if full > known:
            pages = keys[:, :, known * PAGE_SIZE : full * PAGE_SIZE].unflatten(2, (-1, PAGE_SIZE))
            new = torch.stack([pages.amin(3), pages.amax(3)])  # [2, batch, heads, pages, head_dim]
            self.bounds = new if known == 0 else torch.cat([self.bounds, new], dim=3)


class QuestCache(DynamicCache):
    """A `DynamicCache` filled with a prompt, of which decode steps attend to a tenth."""

    attention = ATTENTION

    def __init__(self, prompt: DynamicCache):
        super().__init__()
        self.layers = [QuestLayer(i) for i in range(len(prompt.layers))]
        for layer, filled in zip(self.layers, prompt.layers):
            layer.update(filled.keys, filled.values)


def attend(module, query, key, value, attention_mask, **kwargs):
    """Attention in Transformers' terms: of one query token to the best pages, else to everything."""
    bounds = getattr(key, "page_bounds", None)
    if bounds is not None:
        chosen = chosen_tokens(query, bounds, key.shape[2], attention_mask)
        attention_mask = chosen if attention_mask is None else attention_mask & chosen
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def chosen_tokens(
    query: torch.Tensor, bounds: torch.Tensor, length: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """bool `[batch, num_heads, 1, length]`: the tokens that each query head attends to.

    Args:
        query: `[batch, num_heads, 1, head_dim]`.
        bounds: `[2, batch, num_kv_heads, pages, head_dim]`, least and greatest key.
        mask: bool, broadcastable to the result; a page with no visible token is not chosen.
    """
    group = query.shape[1] // bounds.shape[2]
    least, greatest = bounds.repeat_interleave(group, dim=2)
    scores = torch.maximum(query * least, query * greatest).sum(-1)  # [batch, num_heads, pages]
    if mask is not None:
        visible = mask[..., : scores.shape[-1] * PAGE_SIZE].unflatten(-1, (-1, PAGE_SIZE)).any(-1)
        scores = scores.masked_fill(~visible[:, :, 0], -torch.inf)
    # By each row's own length: padding is no token.
    lengths = torch.full((len(query),), length) if mask is None else mask[:, 0, -1].sum(-1).cpu()
    counts = torch.tensor([math.ceil(TOKEN_RATIO * n / PAGE_SIZE) for n in lengths.tolist()], device=query.device)
    ranks = scores.argsort(-1, descending=True).argsort(-1)
    pages = ranks < counts[:, None, None]
    tokens = pages.repeat_interleave(PAGE_SIZE, dim=-1)
    # The page that is being filled holds the newest tokens and is always attended to.
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[-1]), value=True)[:, :, None]


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
