"""Draws a cache's mosaic: layers by time, every segment coloured by what was chosen for it.

    python scripts/plot_mosaic.py --text moby_dick.txt --out docs/mosaic.png

A model goes on with a text, its cache reorganizing the generated segments, or --cache draws a saved one. The colour of
a cell is the number of bits that an element of K, and of V, takes in that layer and segment; KV heads lie above each
other within a layer.
"""

import argparse
import dataclasses
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from demo_model import load_model
from plot_benchmarks import STYLE
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.stats import CacheStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, help="a text file to go on with")
    source.add_argument("--cache", type=Path, help="folder of a saved cache")
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=2048, help="tokens to generate (default 2048)")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/mosaic.png"), help="the picture (default docs/mosaic.png)"
    )
    args = parser.parse_args()
    if args.cache:
        cache = MosaicKVCache.from_pretrained(args.cache)
    else:
        cache = go_on(args.model, args.text.read_text(encoding="utf-8"), args.tokens, args.new_tokens)
    with plt.rc_context(STYLE):
        draw(cache.stats(), args.out)


class _Bar(BaseStreamer):
    def __init__(self, total: int):
        self._bar = tqdm(total=total, unit="token")

    def put(self, value: torch.Tensor) -> None:
        self._bar.update(value.numel() == 1)

    def end(self) -> None:
        self._bar.close()


def go_on(model_id: Path | None, text: str, tokens: int, new_tokens: int) -> MosaicKVCache:
    """The cache after a long answer to the text's beginning."""
    model, tokenizer = load_model(model_id)
    ids = tokenizer(text[: 8 * tokens], return_tensors="pt").input_ids[:, :tokens]
    cache = MosaicKVCache(dataclasses.replace(MosaicKVConfig(), reorganize="sync"))
    length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, streamer=_Bar(new_tokens), **length)
    return cache


def draw(stats: CacheStats, path: Path) -> None:
    """One picture for K and one for V, above each other."""
    figure, axes = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    first_row = [segment for segment in stats.strategies if segment.row == 0]
    every = [bits for s in first_row for states in (s.keys, s.values) for bits in states.bits_per_element]
    scale = matplotlib.colors.Normalize(min(every), max(every))
    colours = matplotlib.colormaps["viridis"]
    for axis, kind in zip(axes, ("keys", "values")):
        for segment in first_row:
            bits = getattr(segment, kind).bits_per_element
            for head, taken in enumerate(bits):
                low = segment.layer + head / len(bits)
                cell = (segment.start, low), segment.length, 1 / len(bits)
                axis.add_patch(plt.Rectangle(*cell, facecolor=colours(scale(taken)), edgecolor="white", linewidth=0.2))
        axis.set(xlim=(0, stats.tokens), ylim=(1 + max(s.layer for s in first_row), 0), ylabel=f"layer, {kind}")
        axis.grid(False)
    axes[1].set_xlabel("token")
    figure.colorbar(matplotlib.cm.ScalarMappable(scale, colours), ax=axes, label="bits an element")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
