"""Synthetic K and V with the spectrum of a real model, for benchmarks at lengths that no prefill would reach.

How many elements threshold selection keeps depends on how a head's energy is spread over its principal channels, so
white noise would not do. A vector here is a fixed mean plus Gaussian noise with a measured spectrum in a random
orthogonal basis of its head; part of the noise drifts slowly along the sequence, so that neighbouring tokens are
alike and whole blocks stand out, as they do in real keys.

The tables below are averages over all layers and KV heads of SmolLM2-135M-Instruct (head_dim 64) on a needle prompt
of 2048 tokens, K after its rotary embedding. `python scripts/synthetic.py` measures them again and prints them.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from demo_model import load_model
from needle import make_needle, prompt_ids

from mosaickv_hf import MosaicKVConfig
from mosaickv_hf.sequence import SequenceStore

_KNOTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 60, 63)
"""Channels of 64, most energy first, at which the spectra are tabulated; between them log energy is interpolated."""

_SPECTRUM = {
    "key": (
        0.11908, 0.07342, 0.05718, 0.04992, 0.04483, 0.03829, 0.03290, 0.02502, 0.01880, 0.01454, 0.01148, 0.00783,
        0.00552, 0.00378, 0.00241, 0.00179, 0.00113,
    ),
    "value": (
        0.12729, 0.07639, 0.06131, 0.04996, 0.04363, 0.03486, 0.02904, 0.02219, 0.01755, 0.01432, 0.01178, 0.00841,
        0.00606, 0.00436, 0.00304, 0.00241, 0.00165,
    ),
}  # fmt: skip
"""Share of a principal channel in the variance."""

_MEAN_SHARE = {"key": 0.545, "value": 0.200}
"""Share of the mean vector in the energy."""

_DRIFT_SHARE = {"key": 0.65, "value": 0.19}
"""Correlation of neighbouring tokens, mean taken out: the share of the noise that drifts."""

_DRIFT_TOKENS = 64
"""Tokens over which the drifting part becomes another: the correlation of keys has fallen to a third there."""


class SyntheticStates:
    """A source of K or V of one layer.

    Args:
        kind: `"key"` or `"value"`.
        num_heads: KV heads.
        head_dim: channels; spectra are stretched from 64.
        seed: everything random follows from it.
    """

    def __init__(self, kind: str, num_heads: int, head_dim: int, seed: int = 0):
        self._generator = torch.Generator().manual_seed(2 * seed + (kind == "value"))
        self._drift = _DRIFT_SHARE[kind]
        share = _MEAN_SHARE[kind]
        basis = torch.linalg.qr(self._noise(num_heads, head_dim, head_dim)).Q
        # Energy of a vector: head_dim.
        deviation = (spectrum(kind, head_dim) * head_dim * (1 - share)).sqrt()
        self._transform = deviation[:, None] * basis
        direction = torch.nn.functional.normalize(self._noise(num_heads, 1, head_dim), dim=-1)
        self._mean = direction * (share * head_dim) ** 0.5

    def take(self, count: int) -> torch.Tensor:
        """The next `[num_heads, count, head_dim]` vectors, fp32."""
        heads, head_dim = self._mean.shape[0], self._mean.shape[2]
        knots = self._noise(heads, -(-count // _DRIFT_TOKENS) + 1, 1, head_dim)
        later = ((torch.arange(_DRIFT_TOKENS) + 0.5) / _DRIFT_TOKENS)[:, None]
        drift = (knots[:, :-1] * (1 - later) + knots[:, 1:] * later) / (later**2 + (1 - later) ** 2).sqrt()
        noise = self._noise(heads, count, head_dim) * (1 - self._drift) ** 0.5
        noise += drift.flatten(1, 2)[:, :count] * self._drift**0.5
        return torch.baddbmm(self._mean, noise, self._transform)

    def parts(self, count: int, part: int) -> Iterator[torch.Tensor]:
        """`take(count)` in parts of at most `part` tokens, so that the temporary memory stays small."""
        for first in range(0, count, part):
            yield self.take(min(part, count - first))

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


def spectrum(kind: str, head_dim: int) -> torch.Tensor:
    """`[head_dim]`: the principal channels' shares of the variance, which add up to 1."""
    places = (np.arange(head_dim) + 0.5) / head_dim * 64 - 0.5
    energy = np.exp(np.interp(places, _KNOTS, np.log(_SPECTRUM[kind])))
    return torch.tensor(energy / energy.sum(), dtype=torch.float32)


def dense_states(
    num_rows: int, num_heads: int, length: int, head_dim: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer, `[num_rows, num_heads, length, head_dim]` fp32 each; every row is a sequence of its own."""
    both = []
    for kind in ("key", "value"):
        states = torch.empty(num_rows, num_heads, length, head_dim)
        for row, target in enumerate(states):
            source = SyntheticStates(kind, num_heads, head_dim, seed + row)
            place = 0
            for part in source.parts(length, 8192):
                target[:, place : place + part.shape[1]] = part
                place += part.shape[1]
        both.append(states)
    return both[0], both[1]


def packed_sequence(keys: torch.Tensor, values: torch.Tensor, config: MosaicKVConfig) -> SequenceStore:
    """`[num_heads, length, head_dim]` states packed as a prompt is, a segment at a time."""
    sequence = SequenceStore()
    for key_part, value_part in zip(keys.split(config.segment_length, 1), values.split(config.segment_length, 1)):
        sequence.buffer.append(key_part, value_part)
        while count := sequence.ripe(config, prompt=True):
            sequence.pack(count, config)
    while count := sequence.ripe(config, prompt=False):
        sequence.pack(count, config)
    return sequence


@torch.no_grad()
def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt (default 2048)")
    args = parser.parse_args()

    from transformers import DynamicCache

    model, tokenizer = load_model()
    cache = DynamicCache()
    ids = prompt_ids(tokenizer, make_needle(tokenizer, args.tokens, num_keys=4, seed=0).text)
    model(ids, cache=cache, logits_to_keep=1)
    for kind in ("key", "value"):
        # Without the sinks, which are stored raw.
        states = [getattr(layer, kind + "s")[0, :, 4:] for layer in cache.layers]
        print(kind, _measure(torch.cat(states).double()))


def _measure(states: torch.Tensor) -> str:
    """The three tables' entries for `[heads, n, 64]` states."""
    mean = states.mean(1, keepdim=True)
    mean_share = mean.square().sum((1, 2)) / states.square().sum(-1).mean(1)
    rest = states - mean
    energies = torch.linalg.eigvalsh(rest.transpose(1, 2) @ rest).flip(-1)
    shares = (energies / energies.sum(-1, keepdim=True)).mean(0)
    neighbours = (rest[:, 1:] * rest[:, :-1]).sum((1, 2)) / rest.square().sum((1, 2))
    table = ", ".join(f"{shares[knot]:.5f}" for knot in _KNOTS)
    return f"mean {mean_share.mean():.3f}, neighbours {neighbours.mean():.3f}, spectrum {table}"


if __name__ == "__main__":
    main()
