"""Long-form generation, where segments are reorganized as they close: same tokens with and without the thread, and
what the thread costs.

A model goes on with a text for thousands of tokens: greedily, with an end that never comes. MosaicKVCache does so with
the reorganizer's thread (twice), without it, and with segments left as they are; DynamicCache shows how evenly steps
come without any of it. The methods take turns.

    python scripts/long_form.py --text moby_dick.txt --json benchmarks/long_form.json
"""

import argparse
import dataclasses
import json
import statistics
from itertools import pairwise
from pathlib import Path

import torch
from demo_model import load_model
from measure import percentile
from quickstart import Clock
from record import environment
from transformers import Cache, DynamicCache

from mosaickv_hf import MosaicKVCache, MosaicKVConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", type=Path, required=True, help="a text file to go on with")
    parser.add_argument("--skip", type=int, default=20000, help="characters to leave out in front (default 20000)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=2048, help="length of the answer (default 2048)")
    parser.add_argument("--preset", default="default", help="preset of MosaicKVCache (default: default)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every method but the first (default 2)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    text = args.text.read_text(encoding="utf-8")[args.skip :]
    ids = tokenizer(text[: 8 * args.tokens], return_tensors="pt").input_ids[:, : args.tokens]
    preset = MosaicKVConfig.preset(args.preset)
    caches = {mode: dataclasses.replace(preset, reorganize=mode) for mode in ("async", "sync", "off")}

    answers: dict[str, list[list[int]]] = {}
    times: dict[str, list[float]] = {}
    stats = {}
    for turn in range(args.rounds):
        for name in ("dynamic", *caches):
            if name == "off" and turn:
                continue  # it only shows what reorganizing changes
            cache = DynamicCache() if name == "dynamic" else MosaicKVCache(caches[name])
            answer, seconds = go_on(model, ids, cache, args.new_tokens)
            answers.setdefault(name, []).append(answer)
            times.setdefault(name, []).extend(seconds)
            stats[name] = None if name == "dynamic" else cache.stats()
            print(f"turn {turn + 1}, {name}: median {statistics.median(seconds) * 1e3:.1f} ms", flush=True)

    ours = [*answers["async"], *answers["sync"]]
    spread = {name: percentile(taken, 99) / statistics.median(taken) for name, taken in times.items()}
    waited = stats["async"].wait_seconds / (sum(times["async"]) / args.rounds)
    result = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": args.new_tokens,
        "preset": args.preset,
        "same_tokens": all(answer == ours[0] for answer in ours),
        "swaps": stats["async"].swaps,
        "waits": stats["async"].waits,
        "wait_share": waited,
        "p99_to_median": spread,
        "jitter_ratio": spread["async"] / spread["dynamic"],
        "tbt_median_ms": {name: 1e3 * statistics.median(taken) for name, taken in times.items()},
        "bytes": {name: None if s is None else s.bytes_by_kind for name, s in stats.items()},
        "ratio": {name: None if s is None else s.ratio for name, s in stats.items()},
        "ratio_without_open": {name: None if s is None else s.ratio_without_open for name, s in stats.items()},
        **environment(),
    }
    print(f"\n{'method':<10}{'TBT ms':>10}{'p99/median':>12}{'ratio':>8}{'without open':>14}{'swaps':>7}")
    for name, taken in times.items():
        s = stats[name]
        held = "" if s is None else f"{s.ratio:>8.2f}{s.ratio_without_open:>14.2f}{s.swaps:>7}"
        print(f"{name:<10}{1e3 * statistics.median(taken):>10.1f}{spread[name]:>12.2f}{held}")
    print(f"\nwith the thread and without, every turn: {'the same' if result['same_tokens'] else 'OTHER'} tokens")
    print(f"waiting for the thread: {stats['async'].waits} times, {100 * waited:.2f} % of the time")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if not result["same_tokens"]:
        raise SystemExit("The thread changes the tokens.")


def go_on(model, ids: torch.Tensor, cache: Cache, new_tokens: int) -> tuple[list[int], list[float]]:
    """The tokens that follow, and the seconds between them, from the third on: the second may come with packing."""
    clock = Clock()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
    )
    return output[0, ids.shape[1] :].tolist(), [after - before for before, after in pairwise(clock.times[2:])]


if __name__ == "__main__":
    main()
