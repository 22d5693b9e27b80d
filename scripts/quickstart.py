"""The main job on a real model: a needle question over a long prompt, with DynamicCache and with MosaicKVCache."""

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from demo_model import load_model
from needle import make_needle, prompt_ids
from transformers import Cache, DynamicCache

from mosaickv_hf import MosaicKVCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default 4096)")
    parser.add_argument("--preset", default="default", help="preset of MosaicKVCache (default: default)")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the prompt (default 1000)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    needle = make_needle(tokenizer, args.tokens, num_keys=1, seed=args.seed)
    ids = prompt_ids(tokenizer, needle.text)
    print(f"Prompt of {ids.shape[1]} tokens; the hidden number is {needle.answer}.\n")

    full, mosaic = DynamicCache(), MosaicKVCache(args.preset)
    rows = [
        ("DynamicCache", *answer(model, tokenizer, ids, full)),
        ("MosaicKVCache", *answer(model, tokenizer, ids, mosaic)),
    ]
    stats = mosaic.stats()
    held = [sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers), stats.bytes]
    print(f"{'cache':<16}{'answer':<16}{'KV memory':>14}{'2nd token':>12}{'decode':>15}")
    for (name, text, prefill, decode), size in zip(rows, held):
        print(f"{name:<16}{text:<16}{size / 1e6:>11.1f} MB{prefill:>10.2f} s{decode * 1e3:>9.1f} ms/tok")
    print(f"\nAs bf16 the full cache would take {stats.bytes_bf16 / 1e6:.1f} MB: {stats.ratio:.2f} times as much.\n")
    print(stats)

    result = {
        "prompt_tokens": ids.shape[1],
        "answer_full": rows[0][1],
        "answer_mosaic": rows[1][1],
        "kv_bytes_bf16": stats.bytes_bf16,
        "kv_bytes_mosaic": stats.bytes,
        "ratio": stats.ratio,
        "dense_materializations": stats.dense_materializations,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if result["answer_full"] != result["answer_mosaic"]:
        raise SystemExit("The two answers differ.")


def answer(model, tokenizer, ids: torch.Tensor, cache: Cache, max_new_tokens: int = 10) -> tuple[str, float, float]:
    """The greedy answer, the seconds to its second token, and the median seconds per token from there on.

    To the second, since a prompt below `min_segment_length` is packed with the first decode step.
    """
    clock = Clock()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=clock,
    )
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
    start, _, second, *later = clock.times  # the first put is the prompt itself
    return text, second - start, statistics.median(after - before for before, after in pairwise([second, *later]))


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self):
        self.times = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
