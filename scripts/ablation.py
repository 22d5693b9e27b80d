"""What each part of the method adds, at equal bytes: KL and needle answers, step by step (the paper's ablation figure).

    python scripts/ablation.py --json benchmarks/ablation.json

1. fixed mask: each head keeps the same channels of all tokens, those of most energy, as bf16.
2. + SVD: the same after rotation into principal channels.
3. + per-vector selection: every vector keeps its own largest elements (the paper's packed form).
4. + dynamic strategy: how many, for each layer and KV head and for K and V apart, by what the newest queries make of
   the loss: the marginal gains of all heads are spent in order until the bytes are.
5. + quantized threshold selection: elements below some share of a step are dropped, the others quantized with it; a
   step and bits for each head by the same measure, as the default preset does.

All tokens are attended to, so that nothing but the channels differs; sinks and the newest tokens stay as they are.
Every step gets as many bits an element as `--bits` says, rotations and bitmaps included; what it takes is measured.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from check_accuracy import divergence, greedy
from demo_model import load_model
from needle import make_needle, prompt_ids
from record import environment
from tqdm import tqdm
from transformers import Cache, DynamicCache

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.compression import Prompt as Segment
from mosaickv_hf.compression import compress, unpack_blocks
from mosaickv_hf.compression.rotation import fit_basis

CONFIG = MosaicKVConfig()
FIRST, LAST = CONFIG.sink_tokens, CONFIG.recent_window

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, `[num_kv_heads, n, head_dim]` fp32, of the tokens that are compressed."""
Restored = tuple[Layers, float]
"""The same as they come back, and the bits an element that they took."""


class Prompt:
    """A prompt that the model has read, and what its newest queries make of noise in K and V.

    Attributes:
        segments: per layer, with the newest queries.
        layers: see `Layers`.
        weights: per layer `[num_kv_heads]` of K and of V: how much a squared error in each element changes the
            output of attention, relative to it.
    """

    def __init__(self, raw: MosaicKVCache):
        self._raw = raw
        self._whole = [(layer.keys[0], layer.values[0]) for layer in raw.to_dynamic_cache().layers]
        ends = (slice(FIRST), slice(FIRST, -LAST), slice(-LAST, None))
        self.segments = []
        for whole, layer in zip(self._whole, raw.layers):
            states = (tuple(x[:, part] for x in whole) for part in ends)
            self.segments.append(Segment(*states, layer.queries[0, :, :, -CONFIG.query_window :], CONFIG))
        self.layers: Layers = [segment.packed for segment in self.segments]
        self.weights = [tuple(weight.sum(-1) for weight in segment.weights) for segment in self.segments]

    def cache(self, restored: Layers) -> DynamicCache:
        """A cache of the prompt with these in place of the compressed tokens."""
        cache = DynamicCache()
        for i, (whole, layer) in enumerate(zip(self._whole, restored)):
            states = []
            for x, middle in zip(whole, layer):
                x = x.clone()
                x[:, FIRST : x.shape[1] - LAST] = middle
                states.append(x[None])
            cache.update(*states, i)
        return cache


def fixed_mask(prompt: Prompt, bits: float) -> Restored:
    return _each(prompt, lambda x: _leading(x, x.square().sum(1), bits))


def with_svd(prompt: Prompt, bits: float) -> Restored:
    def restore(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        rotate, back, cost = _rotation(x)
        rotated = rotate(x)
        restored, took = _leading(rotated, rotated.square().sum(1), bits - cost)
        return back(restored), took + cost

    return _each(prompt, restore)


def per_vector(prompt: Prompt, bits: float) -> Restored:
    def restore(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        rotate, back, cost = _rotation(x)
        kept = int((bits - cost - 1) * x.shape[2] / 16)
        counts = torch.full((x.shape[0],), kept)
        return back(_largest(rotate(x), counts)), 16 * kept / x.shape[2] + 1 + cost

    return _each(prompt, restore)


def dynamic(prompt: Prompt, bits: float) -> Restored:
    """Largest elements of every vector; how many, each head says."""
    rotated, gains, backs, spent = [], [], [], 0.0
    for layer, weights in zip(prompt.layers, prompt.weights):
        for x, weight in zip(layer, weights):
            rotate, back, cost = _rotation(x)
            rotated.append(rotate(x))
            backs.append(back)
            spent += (cost + 1) * x.shape[0]
            # What the j-th largest element of a vector brings, on average, in a head.
            ordered = rotated[-1].square().sort(dim=-1, descending=True).values.mean(1)
            gains.append(weight[:, None] * ordered)
    heads, head_dim = gains[0].shape
    budget = int((bits * heads * len(gains) - spent) * head_dim / 16)
    threshold = torch.cat(gains).flatten().sort(descending=True).values[budget]
    counts = [(gain > threshold).sum(-1) for gain in gains]
    restored = [back(_largest(x, count)) for x, back, count in zip(rotated, backs, counts)]
    took = sum(16 * int(count.sum()) / head_dim for count in counts) + spent
    return list(zip(restored[::2], restored[1::2])), took / (heads * len(gains))


def threshold(prompt: Prompt, bits: float) -> Restored:
    """What the default preset does, with its losses scaled until the bytes fit."""
    low, high = 1e-4, 1e4
    best = None
    for _ in range(12):
        factor = (low * high) ** 0.5
        result = _quantized(prompt, factor)
        if result[1] > bits:
            low = factor
        else:
            high, best = factor, result
    return best or result


def _quantized(prompt: Prompt, factor: float) -> Restored:
    restored, took, count = [], 0, 0
    for given in prompt.segments:
        segment = compress(*given.packed, given.bases(factor), CONFIG)
        blocks = torch.arange(segment.num_blocks).expand(given.packed[0].shape[0], -1)
        both = [
            states.basis.rotate_back(unpack_blocks(states, blocks))[:, : segment.length]
            for states in (segment.keys, segment.values)
        ]
        restored.append(tuple(both))
        took += 8 * sum(tensor.nbytes for _, tensor in segment.tensors())
        count += sum(x.numel() for x in given.packed)
    return restored, took / count


def _each(prompt: Prompt, restore: Callable[[torch.Tensor], tuple[torch.Tensor, float]]) -> Restored:
    layers, took = [], []
    for layer in prompt.layers:
        parts = [restore(x) for x in layer]
        layers.append(tuple(x for x, _ in parts))
        took += [bits for _, bits in parts]
    return layers, statistics.fmean(took)


def _rotation(x: torch.Tensor) -> tuple[Callable, Callable, float]:
    """Into the principal channels, back, and the bits an element that storing them takes."""
    basis = fit_basis(x, num_dense=0, bits=16)
    return basis.rotate, basis.rotate_back, 8 * (basis.rotation.nbytes + basis.rotation_scale.nbytes) / x.numel()


def _leading(x: torch.Tensor, energy: torch.Tensor, bits: float) -> tuple[torch.Tensor, float]:
    """Only the channels of most energy, as bf16."""
    kept = int(bits * x.shape[2] / 16)
    mask = torch.zeros_like(energy).scatter_(1, energy.topk(kept, dim=1).indices, 1.0)
    return x.bfloat16().float() * mask[:, None], 16 * kept / x.shape[2]


def _largest(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Of every vector the largest elements, as bf16; `[num_kv_heads]` how many."""
    rank = x.abs().argsort(dim=-1, descending=True).argsort(dim=-1)
    return x.bfloat16().float() * (rank < counts[:, None, None])


STEPS: dict[str, Callable[[Prompt, float], Restored]] = {
    "fixed mask": fixed_mask,
    "+ SVD": with_svd,
    "+ per-vector selection": per_vector,
    "+ dynamic strategy": dynamic,
    "+ quantized threshold selection": threshold,
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--bits", type=float, default=5.5, help="of an element of K or V (default 5.5)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompts (default 2048)")
    parser.add_argument("--keys", type=int, default=4, help="needles in a prompt (default 4)")
    parser.add_argument("--samples", type=int, default=20, help="prompts (default 20)")
    parser.add_argument("--seed", type=int, default=1000, help="first seed; below 1000 is for development")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    kl, right, bits = ({name: [] for name in STEPS} for _ in range(3))
    full_right = []
    for seed in tqdm(range(args.seed, args.seed + args.samples), unit="prompt"):
        needle = make_needle(tokenizer, args.tokens, args.keys, seed)
        raw = MosaicKVCache("raw")
        logits = model(prompt_ids(tokenizer, needle.text), cache=raw, logits_to_keep=1).logits[0, -1]
        prompt = Prompt(raw)
        answer, truth = greedy(model, tokenizer, logits, raw.to_dynamic_cache())
        full_right.append(needle.answer in tokenizer.decode(answer))
        for name, step in STEPS.items():
            restored, took = step(prompt, args.bits)
            bits[name].append(took)
            own, _ = greedy(model, tokenizer, logits, prompt.cache(restored))
            right[name].append(needle.answer in tokenizer.decode(own))
            cache: Cache = prompt.cache(restored)
            kl[name].append(divergence(model, answer, truth, cache))
    steps = [
        {
            "step": name,
            "kl": statistics.fmean(kl[name]),
            "right": sum(right[name]),
            "bits_per_element": statistics.fmean(bits[name]),
            "kl_by_prompt": kl[name],
        }
        for name in STEPS
    ]
    print(f"{'step':<34}{'KL':>10}{'right':>12}{'bits':>8}")
    print(f"{'full':<34}{0:>10.4f}{sum(full_right):>6} of {args.samples:<2}{16:>8.2f}")
    for s in steps:
        print(f"{s['step']:<34}{s['kl']:>10.4f}{s['right']:>6} of {args.samples:<2}{s['bits_per_element']:>8.2f}")
    if args.json:
        name = Path(model.config.name_or_path).name
        about = {"model": name, "tokens": args.tokens, "keys": args.keys, "samples": args.samples, "seed": args.seed}
        result = {"steps": steps, "full_right": sum(full_right), **about, **environment()}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
