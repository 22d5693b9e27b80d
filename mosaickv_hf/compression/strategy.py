"""How coarsely each KV head may be quantized, measured with the queries that a prompt ended with.

Heads differ by orders of magnitude in how much noise they bear: one that spreads its attention over many tokens
averages it away, one that looks up a few tokens does not (`docs/decisions.md`). Which heads those are depends on what
is asked, so it is measured on what the newest queries attend to.
"""

import dataclasses

import torch

from ..config import MosaicKVConfig
from ..segments import Basis

# How far a head's step may be from the config's. Coarser would trust a few queries for all to come. Finer, four bits
# would clip, so K takes eight in a segment with a head that asks for less than _EIGHT_BITS_FROM; V gains nothing by it.
_COARSEST, _FINEST = 4.0, {8: 0.1, 4: 0.4, 2: 0.4}
_EIGHT_BITS_FROM = 0.2

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, `[num_kv_heads, n, head_dim]` each (their head_dims may differ)."""


def adapt_steps(
    bases: tuple[Basis, Basis],
    queries: torch.Tensor,
    before: States,
    packed: States,
    after: States,
    config: MosaicKVConfig,
) -> tuple[tuple[Basis, Basis], MosaicKVConfig]:
    """The bases with each KV head's step scaled towards the config's loss, and the config with the bits these need.

    A step's squared error grows with its square, so the step that meets the target follows from the error of one.

    Args:
        bases: of K and V.
        queries, before, packed, after: as for `output_errors`.
    """
    adapted = []
    errors = output_errors(bases, queries, before, packed, after)
    for kind, basis, error in zip(("key", "value"), bases, errors):
        factors = (getattr(config, f"{kind}_loss") / error).sqrt()
        if kind == "key" and factors.min() < _EIGHT_BITS_FROM:
            config = dataclasses.replace(config, key_bits=8)
        factors = factors.clamp(_FINEST[getattr(config, f"{kind}_bits")], _COARSEST)
        adapted.append(dataclasses.replace(basis, step=basis.step * factors))
    return (adapted[0], adapted[1]), config


def output_errors(
    bases: tuple[Basis, Basis], queries: torch.Tensor, before: States, packed: States, after: States
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected squared error of the attention output from quantizing K, and from quantizing V, with the bases' steps.

    With p a query's weights, o its output and e the errors of a step s (s^2 / 12 in every sparse channel): an error
    in K changes the output by sum_t p_t (q e_t) (v_t - o), one in V by sum_t p_t e_t. Errors of tokens are
    independent, so squares add up.

    Args:
        bases: of K and V.
        queries: `[num_kv_heads, group, n, head_dim]`, of the newest n tokens, multiplied by the softmax scale.
        before, packed, after: K and V `[num_kv_heads, length, head_dim]` of the tokens that stay raw in front, of
            those that are to be packed, and of the newest. Segments packed before are left out, which makes the
            others more important than they are.

    Returns:
        `[num_kv_heads]` fp32 each, relative to the mean squared output of the layer.
    """
    first = before[0].shape[1]
    end = first + packed[0].shape[1]
    positions = torch.arange(end + after[0].shape[1], device=queries.device)
    # A row of a padded batch may have fewer tokens than others have queries.
    queries = queries[:, :, -len(positions) :]
    hidden = positions > positions[-queries.shape[2] :, None]
    dense = [basis.offset.shape[1] for basis in bases]
    by_key, by_value, power = [], [], []
    # One head at a time: weights of a long prompt are large.
    for head in range(queries.shape[0]):
        query = queries[head].float()
        keys, values = (torch.cat([part[i][head] for part in (before, packed, after)]).float() for i in (0, 1))
        weights = (query @ keys.T).masked_fill_(hidden, -torch.inf).softmax(-1)
        output = weights @ values
        squares = weights[..., first:end].square()
        values = values[first:end]
        # sum_t p_t^2 |v_t - o|^2
        distances = (
            squares @ values.square().sum(-1)
            - 2 * ((squares @ values) * output).sum(-1)
            + squares.sum(-1) * output.square().sum(-1)
        ).clamp_min(0)
        rotation = bases[0].rotation
        rotated = query if rotation is None else query @ rotation[head].float()
        by_key.append((distances * rotated[..., dense[0] :].square().sum(-1)).mean())
        by_value.append(squares.sum(-1).mean() * (values.shape[1] - dense[1]))
        power.append(output.square().sum(-1).mean())
    power = torch.stack(power).mean().clamp_min(torch.finfo(torch.float32).tiny)
    return tuple(
        torch.stack(by_head) / power * basis.step.square() / 12 for by_head, basis in zip((by_key, by_value), bases)
    )
