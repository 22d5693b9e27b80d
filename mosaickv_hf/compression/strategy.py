"""How coarsely each KV head may be quantized, measured with the queries that a prompt ended with.

Heads differ by orders of magnitude in how much noise they bear: one that spreads its attention over many tokens
averages it away, one that looks up a few tokens does not (`docs/decisions.md`). Which heads those are depends on what
is asked, so it is measured on what the newest queries attend to.
"""

import torch

from ..config import MosaicKVConfig
from ..segments import Basis
from .packing import nearest

# Tokens at most that a loss is measured on.
SAMPLE_TOKENS = 256

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, `[num_kv_heads, n, head_dim]` each (their head_dims may differ)."""


def sample(states: torch.Tensor, most: int) -> torch.Tensor:
    """`[num_kv_heads, n, head_dim]` states of so many tokens at most, evenly spaced."""
    return states[:, :: -(-states.shape[1] // most)]


def output_weights(
    axes: torch.Tensor | None, queries: torch.Tensor, before: States, packed: States, after: States
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much squared errors in the channels of K, and of V, change the attention output.

    With p a query's weights, o its output and e the errors: an error in K changes the output by
    sum_t p_t (q e_t) (v_t - o), one in V by sum_t p_t e_t. Errors of tokens are taken as independent, so that squares
    add up.

    Args:
        axes: of K's basis, see `Basis.axes`.
        queries: `[num_kv_heads, group, n, head_dim]`, of the newest n tokens, multiplied by the softmax scale.
        before, packed, after: K and V `[num_kv_heads, length, head_dim]` of the tokens that stay raw in front, of
            those that are to be packed, and of the newest. Segments packed before are left out, which makes the
            others more important than they are.

    Returns:
        `[num_kv_heads, head_dim]` fp32 each: for a squared error of one in a channel of every packed token, the squared
        error of the output, relative to the mean squared output of the layer.
    """
    first = before[0].shape[1]
    end = first + packed[0].shape[1]
    positions = torch.arange(end + after[0].shape[1], device=queries.device)
    # A row of a padded batch may have fewer tokens than others have queries.
    queries = queries[:, :, -len(positions) :]
    hidden = positions > positions[-queries.shape[2] :, None]
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
        rotated = query if axes is None else query @ axes[head]
        by_key.append((distances[..., None] * rotated.square()).mean((0, 1)))
        by_value.append(squares.sum(-1).mean().expand(values.shape[1]))
        power.append(output.square().sum(-1).mean())
    power = torch.stack(power).mean().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.stack(by_key) / power, torch.stack(by_value) / power


def relative_losses(states: States, bases: tuple[Basis, Basis], config: MosaicKVConfig) -> tuple[float, float]:
    """Squared error that packing these tokens with these bases makes, relative to their energy, of K and of V.

    On evenly spaced tokens, from the rotated elements alone: what is dropped, and the rounding of what is kept.
    """
    losses = []
    for part, basis, kind in zip(states, bases, ("key", "value")):
        part = sample(part, SAMPLE_TOKENS)
        rotated = basis.rotate(part.float())
        num_dense = basis.offset.shape[1]
        tail = rotated[..., num_dense:].square()
        unit = basis.step[:, None, None]
        rounding = torch.zeros_like(tail)
        if basis.bits[0] <= 8:
            for head, bits in enumerate(basis.bits):
                steps = tail[head].sqrt() / basis.step[head]
                rounding[head] = ((steps - nearest(steps, bits, config.group_size)) * basis.step[head]).square()
        if config.selection == "threshold":
            error = torch.where(tail < (config.dead_zone * unit).square(), tail, rounding).sum()
        else:
            kept = max(0, round(getattr(config, f"{kind}_channel_ratio") * part.shape[2]) - num_dense)
            order = tail.argsort(dim=-1, descending=True)
            error = rounding.gather(-1, order[..., :kept]).sum() + tail.gather(-1, order[..., kept:]).sum()
        error = error + part.shape[1] * basis.scale.square().sum() / 12
        losses.append(error / rotated.square().sum().clamp_min(torch.finfo(torch.float32).tiny))
    return losses[0].item(), losses[1].item()
