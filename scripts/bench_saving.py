"""Loading a saved cache against reading its prompt again.

    python scripts/bench_saving.py --json benchmarks/saving.json

The cache holds synthetic K and V in the demonstration model's geometry (`synthetic.py`), saved once. Rounds alternate
between loading it in a new process, checks and all, and reading a prompt of --prefill-tokens with the model: fewer
tokens than the cache holds, so that its time is a lower bound of what loading saves.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
from demo_model import load_model
from measure import Limits, interleave
from record import environment
from synthetic import SyntheticStates
from transformers import DynamicCache

from mosaickv_hf import MosaicKVCache


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=32768, help="that the saved cache holds (default 32768)")
    parser.add_argument("--prefill-tokens", type=int, default=4096, help="that are read (default 4096)")
    parser.add_argument("--preset", default="default", help="preset of MosaicKVCache (default: default)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not (default 5)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()

    model, _ = load_model(args.model)
    ids = torch.randint(3, model.config.vocab_size, (1, args.prefill_tokens))
    with tempfile.TemporaryDirectory() as folder:
        cache = filled(model.config, args.tokens, args.preset)
        held = cache.stats()
        cache.save_pretrained(folder, model=model)
        on_disk = sum(path.stat().st_size for path in Path(folder).iterdir())
        del cache

        def read() -> dict[str, float]:
            start = time.perf_counter()
            model(ids, cache=MosaicKVCache(args.preset), logits_to_keep=1)
            return {"total": time.perf_counter() - start}

        limits = Limits()
        steps = {"load": lambda: in_new_process(folder), "prefill": read}
        times = interleave(steps, args.rounds, limits.measure, warm_up=1)
    load, prefill = times["load"]["total"], times["prefill"]["total"]
    print(f"loading {held.tokens:,} tokens ({on_disk / 1e6:.1f} MB): {load:.3f} s")
    print(f"reading {args.prefill_tokens:,} tokens: {prefill:.3f} s, {prefill / load:.0f} times as long")
    result = {
        "benchmark": "saving",
        "preset": args.preset,
        "tokens": held.tokens,
        "prefill_tokens": args.prefill_tokens,
        "load_seconds": load,
        "prefill_seconds": prefill,
        "bytes_held": held.bytes,
        "bytes_on_disk": on_disk,
        "rounds": args.rounds,
        **limits.to_dict(),
        **environment(),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def filled(config, tokens: int, preset: str) -> MosaicKVCache:
    """A cache of a prompt of so many tokens, layer by layer other ones."""
    whole = DynamicCache()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = [
            SyntheticStates(kind, config.num_key_value_heads, head_dim, seed=layer).take(tokens)[None]
            for kind in ("key", "value")
        ]
        whole.update(*states, layer)
    return MosaicKVCache.from_cache(whole, compression=preset)


def in_new_process(folder: str) -> dict[str, float]:
    """Seconds that `from_pretrained` takes where nothing has been loaded before."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_load, args=(folder, theirs))
    process.start()
    theirs.close()  # so that a load that fails is seen
    seconds = ours.recv()
    process.join()
    return {"total": seconds}


def _load(folder: str, answer) -> None:
    start = time.perf_counter()
    cache = MosaicKVCache.from_pretrained(folder)
    seconds = time.perf_counter() - start
    assert cache.get_seq_length()
    answer.send(seconds)


if __name__ == "__main__":
    main()
