"""Where the bytes of a prompt are given: how much its layers and heads then may lose.

A step's error grows with its square and the bits that it takes fall with its logarithm, so the total loss is least for
the bytes, a byte more gaining as much in every head, where every head loses the same. One factor for all heads' losses
is left to find: bytes fall as it grows, so by bisection, and those of each try are measured on samples of all layers.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

from ..config import MosaicKVConfig
from ..segments import PackedSegment
from .compressor import Bases, compress
from .prompt import Prompt
from .rotation import with_steps
from .strategy import COARSEST, FINEST, adapt_steps

_SAMPLE_TOKENS = 128
# Ranges of the factor of losses, and of steps; halved so often, the bytes are met to about a thousandth.
_LOSSES, _STEPS, _HALVINGS = (1e-5, 1e5), (FINEST[4], COARSEST), 13


def fit_budget(sequences: Sequence[Sequence[Prompt]], config: MosaicKVConfig) -> Callable[[Prompt], Bases]:
    """Fills `memory_budget`.

    Args:
        sequences: of all layers, and of all rows that differ, the segments that they are cut into.
        config: of the prompts.

    Returns:
        what gives each of the prompts its bases: its losses (steps, where no queries have been seen) are the config's
        times one factor for all.

    Warns:
        UserWarning: if even the coarsest steps take more; they are taken.
    """
    prompts = [prompt for segments in sequences for prompt in segments]
    # Of several segments the last one tells which tokens stay raw.
    raw = [states for segments in sequences for states in (*segments[-1].before, *segments[-1].after)]
    packed = [states for prompt in prompts for states in prompt.packed]
    bf16 = sum(2 * states.numel() for states in (*raw, *packed))
    allowed = config.memory_budget * bf16 - sum(states.nbytes for states in raw)
    adapts = all(prompt.errors is not None for prompt in prompts)

    def scaled(factor: float) -> MosaicKVConfig:
        names = ("key_loss", "value_loss") if adapts else ("key_step", "value_step")
        return dataclasses.replace(config, **{name: getattr(config, name) * factor for name in names})

    low, high = _LOSSES if adapts else _STEPS
    excess = _bytes(prompts, scaled(high), config) - allowed
    if excess > 0:
        asked, least = config.memory_budget, config.memory_budget + excess / bf16
        text = f"`memory_budget` is {asked:g}, but the coarsest steps take {least:.3g}; taking these"
        warnings.warn(text, stacklevel=2)
    for _ in range(0 if excess > 0 else _HALVINGS):
        middle = math.sqrt(low * high)
        if _bytes(prompts, scaled(middle), config) > allowed:
            low = middle
        else:
            high = middle
    found = scaled(high)
    return lambda prompt: _bases(prompt, found, config)


def _bytes(prompts: Sequence[Prompt], scaled: MosaicKVConfig, config: MosaicKVConfig) -> float:
    """What the segments take, packed as `scaled` says where they were fitted as `config` says."""
    total = 0.0
    for prompt in prompts:
        keys, values = prompt.packed
        stride = -(-keys.shape[1] // _SAMPLE_TOKENS)
        sample = keys[:, ::stride], values[:, ::stride]
        total += _whole_bytes(compress(*sample, _bases(prompt, scaled, config), scaled), keys.shape[1])
    return total


def _bases(prompt: Prompt, scaled: MosaicKVConfig, config: MosaicKVConfig) -> Bases:
    if prompt.errors is not None:
        return adapt_steps(prompt.fitted, prompt.errors, scaled)
    factors = scaled.key_step / config.key_step, scaled.value_step / config.value_step
    return tuple(with_steps(b, b.step * factor, b.bits) for b, factor in zip(prompt.fitted, factors))


def _whole_bytes(sample: PackedSegment, tokens: int) -> float:
    """Bytes of a segment of so many tokens, from those of a sample of it."""
    bases = sum(tensor.nbytes for kind, tensor in sample.tensors() if kind == "rotations")
    return bases + (sum(tensor.nbytes for _, tensor in sample.tensors()) - bases) * tokens / sample.length
