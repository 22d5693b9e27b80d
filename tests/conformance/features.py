"""What `generate` and its users do with a cache; each returns what came out of it, as one tensor."""

import copy
from collections.abc import Callable

import torch
from conftest import CACHE, tiny_model
from transformers import Cache

LENGTH, NEW = 90, 16
# No end, without a warning about it.
NO_END = {"eos_token_id": None, "pad_token_id": 0}


def ids(length: int = LENGTH, batch: int = 1, seed: int = 0) -> torch.Tensor:
    # No special tokens, and not the last one, which stands for an image.
    return torch.randint(3, 255, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model, tokens: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
    mask = torch.ones_like(tokens) if mask is None else mask
    settings = {"max_new_tokens": NEW, "do_sample": False, **NO_END, **kwargs}
    return model.generate(input_ids=tokens, attention_mask=mask, **{CACHE: cache}, **settings)


def generate_padded(model, cache: Cache, extra: int = 0, **kwargs) -> torch.Tensor:
    """Two rows, the second with 31 tokens of padding, and both with some more."""
    tokens = torch.nn.functional.pad(ids(batch=2), (extra, 0))
    mask = torch.ones_like(tokens)
    mask[:, :extra] = 0
    mask[1, : extra + 31] = 0
    return generate(model, tokens.masked_fill(mask == 0, 0), cache, mask, **kwargs)


def forward(model, tokens: torch.Tensor, cache: Cache, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, **{CACHE: cache}, **kwargs).logits


def greedy(model, cache):
    return generate(model, ids(), cache)


def left_padded_batch(model, cache):
    return generate_padded(model, cache)


def extra_left_padding(model, cache):
    return generate_padded(model, cache, extra=13)[:, 13:]


def sampling(model, cache):
    torch.manual_seed(1)
    return generate(model, ids(), cache, do_sample=True, num_return_sequences=3)


def beam_search(model, cache):
    return generate(model, ids(), cache, num_beams=3, num_return_sequences=2)


def beam_sample(model, cache):
    torch.manual_seed(2)  # with some, beams come so close that the order of fp32 sums decides
    return generate_padded(model, cache, do_sample=True, num_beams=2)


def prompt_lookup(model, cache):
    return generate(model, ids(20).repeat(1, 5), cache, prompt_lookup_num_tokens=3)


def assisted(model, cache):
    return generate(model, ids(), cache, assistant_model=tiny_model("llama-group1", num_hidden_layers=1))


def chunked_prefill(model, cache):
    return generate(model, ids(), cache, prefill_chunk_size=40)


def continue_from_past(model, cache):
    first = generate(model, ids(), cache)
    return generate(model, torch.cat([first, ids(9, seed=1)], dim=1), cache)


def new_tokens_only(model, cache):
    """As one who keeps the past in the cache alone."""
    forward(model, ids(), cache)
    return _go_on(model, cache, 2, steps=NEW)


def position_ids(model, cache):
    forward(model, ids(), cache, position_ids=torch.arange(LENGTH)[None])
    out = []
    token = ids(1, seed=2)
    for i in range(NEW):
        token = forward(model, token, cache, position_ids=torch.tensor([[LENGTH + i]]))[:, -1:].argmax(-1)
        out.append(token)
    return torch.cat(out, dim=1)


def inputs_embeds(model, cache):
    embeds = model.get_input_embeddings()(ids())
    mask = torch.ones(embeds.shape[:2], dtype=torch.long)
    settings = {"max_new_tokens": NEW, "do_sample": False, **NO_END}
    return model.generate(inputs_embeds=embeds, attention_mask=mask, **{CACHE: cache}, **settings)


def output_dict(model, cache):
    output = generate(model, ids(), cache, return_dict_in_generate=True)
    assert getattr(output, CACHE, None) is cache or output.past_key_values is cache
    return output.sequences


def deep_copy(model, cache):
    forward(model, ids(), cache)
    other = copy.deepcopy(cache)
    return torch.cat([_go_on(model, c, seed) for c, seed in ((cache, 1), (other, 2), (cache, 3))], dim=1)


def batch_select(model, cache):
    forward(model, ids(batch=3), cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    return _go_on(model, cache, 1, batch=2)


def batch_repeat(model, cache):
    forward(model, ids(), cache)
    cache.batch_repeat_interleave(3)
    return _go_on(model, cache, 1, batch=3)


def crop(model, cache):
    forward(model, ids(), cache)
    cache.crop(-5)
    return _go_on(model, cache, 1)


def crop_far(model, cache):
    forward(model, ids(), cache)
    _go_on(model, cache, 1)
    cache.crop(-60)
    return _go_on(model, cache, 2)


def reset(model, cache):
    forward(model, ids(seed=5), cache)
    cache.reset()
    return generate(model, ids(), cache)


def _go_on(model, cache, seed: int, batch: int = 1, steps: int = 8) -> torch.Tensor:
    out = []
    token = ids(1, batch, seed=seed)
    for _ in range(steps):
        token = forward(model, token, cache)[:, -1:].argmax(-1)
        out.append(token)
    return torch.cat(out, dim=1)


FEATURES: dict[str, Callable[..., torch.Tensor]] = {
    "greedy": greedy,
    "left-padded batch": left_padded_batch,
    "extra left padding": extra_left_padding,
    "sampling, several sequences": sampling,
    "beam search": beam_search,
    "beam sampling": beam_sample,
    "prompt lookup": prompt_lookup,
    "assisted decoding": assisted,
    "prefill in chunks": chunked_prefill,
    "going on from the past": continue_from_past,
    "new tokens only": new_tokens_only,
    "position_ids": position_ids,
    "inputs_embeds": inputs_embeds,
    "output with the cache": output_dict,
    "deepcopy": deep_copy,
    "batch_select_indices": batch_select,
    "batch_repeat_interleave": batch_repeat,
    "crop": crop,
    "crop of packed tokens": crop_far,
    "reset": reset,
}
