"""What compression adds to the time of a prompt on a real model: MosaicKVCache against DynamicCache, in turns.

python scripts/bench_prefill.py --tokens 2048,4096,8192 --json benchmarks/prefill.json
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from demo_model import load_model
from measure import Limits, Times, interleave
from needle import make_needle, prompt_ids
from record import environment
from transformers import Cache, DynamicCache

from mosaickv_hf import MosaicKVCache


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", default="2048,4096,8192", help="lengths of prompts, by comma")
    parser.add_argument("--preset", default="default", help="preset of MosaicKVCache (default: default)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not (default 5)")
    parser.add_argument("--json", type=Path, help="write the results, a list with an entry a length, to this file")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    results = []
    print(f"{'tokens':>8}{'DynamicCache s':>17}{'MosaicKVCache s':>17}{'overhead':>11}")
    for length in map(int, args.tokens.split(",")):
        ids = prompt_ids(tokenizer, make_needle(tokenizer, length, num_keys=1, seed=0).text)
        limits = Limits()
        times = interleave(
            {
                "dynamic": prefill(model, ids, DynamicCache),
                "mosaic": prefill(model, ids, lambda: MosaicKVCache(args.preset)),
            },
            args.rounds,
            limits.measure,
            warm_up=1,
        )
        dynamic, mosaic = times["dynamic"]["total"], times["mosaic"]["total"]
        overhead = 100 * (mosaic / dynamic - 1)
        print(f"{ids.shape[1]:>8}{dynamic:>17.3f}{mosaic:>17.3f}{overhead:>10.1f}%")
        results.append(
            {
                "benchmark": "prefill",
                "preset": args.preset,
                "rounds": args.rounds,
                "tokens": ids.shape[1],
                "dynamic_seconds": dynamic,
                "mosaic_seconds": mosaic,
                "overhead_percent": overhead,
                **limits.to_dict(),
                **environment(),
            }
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def prefill(model, ids: torch.Tensor, new_cache: Callable[[], Cache]) -> Callable[[], Times]:
    """What takes the prompt once and tells the seconds."""

    def timed() -> Times:
        cache = new_cache()
        start = time.perf_counter()
        model(ids, cache=cache, logits_to_keep=1)
        return {"total": time.perf_counter() - start}

    return timed


if __name__ == "__main__":
    main()
