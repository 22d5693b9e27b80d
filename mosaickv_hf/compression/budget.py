"""Where the bytes of a prompt are given: how much its layers and heads then may lose.

The total loss is least for the bytes where a byte more gains as much in every head, and that gain is what a config's
losses set. One factor for them is left to find: bytes fall as it grows, so by bisection, and those of each try are
measured on samples of all layers.
"""

import math
import warnings
from collections.abc import Callable, Sequence

from ..config import MosaicKVConfig
from ..segments import PackedSegment
from .compressor import Bases, compress
from .prompt import Prompt
from .strategy import sample

_SAMPLE_TOKENS = 128
# Range of the factor of losses; halved so often, the bytes are met to about a thousandth.
_LOWEST, _HIGHEST, _HALVINGS = 1e-5, 1e5, 13


def fit_budget(sequences: Sequence[Sequence[Prompt]], config: MosaicKVConfig) -> Callable[[Prompt], Bases]:
    """Fills `memory_budget`.

    Args:
        sequences: of all layers, and of all rows that differ, the segments that they are cut into.
        config: of the prompts.

    Returns:
        what gives each of the prompts its bases: its losses are the config's times one factor for all and its tokens,
        for a bit more of each of them costs as much more.

    Warns:
        UserWarning: if even the coarsest steps take more; they are taken.
    """
    prompts = [prompt for segments in sequences for prompt in segments]
    # Of several segments the last one tells which tokens stay raw.
    raw = [states for segments in sequences for states in (*segments[-1].before, *segments[-1].after)]
    packed = [states for prompt in prompts for states in prompt.packed]
    bf16 = sum(2 * states.numel() for states in (*raw, *packed))
    allowed = config.memory_budget * bf16 - sum(states.nbytes for states in raw)
    mean = sum(prompt.packed[0].shape[1] for prompt in prompts) / len(prompts)

    def bases(prompt: Prompt, factor: float) -> Bases:
        return prompt.bases(factor * prompt.packed[0].shape[1] / mean)

    def taken(factor: float) -> float:
        return sum(_bytes(prompt, bases(prompt, factor)) for prompt in prompts)

    low, high = _LOWEST, _HIGHEST
    excess = taken(high) - allowed
    if excess > 0:
        asked, least = config.memory_budget, config.memory_budget + excess / bf16
        text = f"`memory_budget` is {asked:g}, but the coarsest steps take {least:.3g}; taking these"
        warnings.warn(text, stacklevel=2)
    for _ in range(0 if excess > 0 else _HALVINGS):
        middle = math.sqrt(low * high)
        if taken(middle) > allowed:
            low = middle
        else:
            high = middle
    return lambda prompt: bases(prompt, high)


def _bytes(prompt: Prompt, bases: Bases) -> float:
    """What a prompt takes, packed so."""
    keys, values = (sample(states, _SAMPLE_TOKENS) for states in prompt.packed)
    return _whole_bytes(compress(keys, values, bases, prompt.config), prompt.packed[0].shape[1])


def _whole_bytes(part: PackedSegment, tokens: int) -> float:
    """Bytes of a segment of so many tokens, from those of a sample of it."""
    bases = sum(tensor.nbytes for kind, tensor in part.tensors() if kind == "rotations")
    return bases + (sum(tensor.nbytes for _, tensor in part.tensors()) - bases) * tokens / part.length
