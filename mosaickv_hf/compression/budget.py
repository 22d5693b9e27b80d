"""Where the bytes of a prompt are given: how much its layers and heads then may lose.

A step's error grows with its square and the bits that it takes fall with its logarithm, so the total loss is least for
the bytes, a byte more gaining as much in every head, where every head loses the same. One factor for all heads' losses
is left to find: bytes fall as it grows, so by bisection, and those of each try are measured on samples of all layers.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence

import torch

from ..config import MosaicKVConfig
from ..segments import PackedSegment
from .compressor import Bases, compress
from .prompt import Prompt
from .rotation import with_steps
from .strategy import COARSEST, FINEST, adapt_steps

_SAMPLE_TOKENS = 128
# Ranges of the factor of losses, and of steps; halved so often, the bytes are met to about a thousandth.
_LOSSES, _STEPS, _HALVINGS = (1e-5, 1e5), (FINEST[4], COARSEST), 13


def fit_budget(prompts: Sequence[Prompt], config: MosaicKVConfig) -> MosaicKVConfig:
    """The config whose losses (its steps, if no queries have been seen) fill `memory_budget`, which it then lacks.

    Args:
        prompts: of all layers, and of all sequences that differ.
        config: of the prompts.

    Warns:
        UserWarning: if even the coarsest steps take more; they are taken.
    """
    allowed = config.memory_budget * sum(2 * _numel(prompt) for prompt in prompts)
    adapts = all(prompt.errors is not None for prompt in prompts)

    def scaled(factor: float) -> MosaicKVConfig:
        names = ("key_loss", "value_loss") if adapts else ("key_step", "value_step")
        changed = {name: getattr(config, name) * factor for name in names}
        return dataclasses.replace(config, memory_budget=None, **changed)

    low, high = _LOSSES if adapts else _STEPS
    least = _bytes(prompts, scaled(high), config)
    if least > allowed:
        asked, met = config.memory_budget, config.memory_budget * least / allowed
        warnings.warn(
            f"`memory_budget` is {asked:g}, but the coarsest steps take {met:.3g}; taking these", stacklevel=2
        )
        return scaled(high)
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if _bytes(prompts, scaled(middle), config) > allowed:
            low = middle
        else:
            high = middle
    return scaled(high)


def _bytes(prompts: Sequence[Prompt], scaled: MosaicKVConfig, config: MosaicKVConfig) -> float:
    """What the prompts take, raw tokens included, packed as `scaled` says where they were fitted as `config` says."""
    total = 0.0
    for prompt in prompts:
        keys, values = prompt.packed
        stride = -(-keys.shape[1] // _SAMPLE_TOKENS)
        sample = keys[:, ::stride], values[:, ::stride]
        segment = compress(*sample, _bases(prompt, scaled, config), scaled)
        total += sum(states.nbytes for states in _raw(prompt)) + _whole_bytes(segment, keys.shape[1])
    return total


def _bases(prompt: Prompt, scaled: MosaicKVConfig, config: MosaicKVConfig) -> Bases:
    factors = scaled.key_step / config.key_step, scaled.value_step / config.value_step
    fitted = tuple(with_steps(b, b.step * factor, b.bits) for b, factor in zip(prompt.fitted, factors))
    return fitted if prompt.errors is None else adapt_steps(prompt.fitted, prompt.errors, scaled)


def _whole_bytes(sample: PackedSegment, tokens: int) -> float:
    """Bytes of a segment of so many tokens, from those of a sample of it."""
    bases = sum(tensor.nbytes for kind, tensor in sample.tensors() if kind == "rotations")
    return bases + (sum(tensor.nbytes for _, tensor in sample.tensors()) - bases) * tokens / sample.length


def _numel(prompt: Prompt) -> int:
    return sum(states.numel() for states in (*prompt.packed, *_raw(prompt)))


def _raw(prompt: Prompt) -> list[torch.Tensor]:
    """K and V of the tokens that stay raw; what lies behind a longest segment is for the next ones."""
    newest = prompt.config.recent_window + prompt.config.block_size
    return [*prompt.before, *(states[:, -newest:] for states in prompt.after)]
