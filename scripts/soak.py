"""Generates for minutes on end with a small random model: memory must stay flat, threads few, tokens the same.

    python scripts/soak.py --minutes 10 --json benchmarks/soak.json

Calls of random lengths, batches, presets and turns, as a server would see them, each with a cache of its own that is
dropped. Resident memory, less what the allocator merely keeps, is read after every call. From the second minute on a
random walk with a drift is fitted to the readings (medians of ten seconds): memory moves in steps that stay, as when
the allocator takes one more page or a library's code is first used, so readings are not independent around a line, and
the interval of a least-squares line would exclude zero for half of all runs that do not grow (docs/decisions.md).
Every so often one conversation is held again, word for word.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import random
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from record import environment
from scipy.stats import ttest_1samp
from transformers import LlamaConfig, LlamaForCausalLM

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

_SMALL = dict(min_length=64, min_segment_length=128, min_attended_tokens=64, buffer_tokens=16)
_BINS = 10.0  # seconds
_MOST_CALLS = 1_000_000
# About three kilobytes a call; a wider interval would say little.
_MOST_MB_PER_HOUR = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--warm-up", type=float, default=2.0, help="minutes that do not count (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()

    model = tiny_model()
    choose = random.Random(args.seed)
    process = psutil.Process()
    expected = reference(model)
    start = time.monotonic()
    # Seconds and bytes after each call, in memory that is taken already: a list would be seen to grow.
    readings = torch.full((_MOST_CALLS, 2), torch.nan, dtype=torch.float64)
    most_threads, calls, checks, said = 0, 0, 0, 0
    while (now := time.monotonic() - start) < 60 * args.minutes and calls < _MOST_CALLS:
        if calls % 50 == 0:
            if not torch.equal(reference(model), expected):
                raise SystemExit(f"call {calls}: the first conversation, held again, comes out otherwise")
            checks += 1
        call(model, choose)
        gc.collect()
        give_back()
        # The reorganizers' threads end with their caches, which may take them a moment.
        most_threads = max(most_threads, len([t for t in threading.enumerate() if t.name == "mosaickv"]))
        resident = process.memory_info().rss
        readings[calls, 0], readings[calls, 1] = now, resident
        calls += 1
        if now > 60 * (said + 1):
            said += 1
            print(f"minute {said}: {calls} calls, {resident / 1e6:.1f} MB", flush=True)
    points = binned([r for r in readings[:calls].tolist() if r[0] > 60 * args.warm_up])
    slope, low, high = drift(points)
    result = {
        "minutes": args.minutes,
        "warm_up": args.warm_up,
        "calls": calls,
        "checks": checks,
        "threads_of_dropped_caches": most_threads,
        "resident_mb": resident / 1e6,
        "resident_mb_by_bin": [size / 1e6 for _, size in points],
        "mb_per_hour": slope * 3600 / 1e6,
        "mb_per_hour_interval_95": [low * 3600 / 1e6, high * 3600 / 1e6],
        "bytes_per_call_at_most": high * 60 * args.minutes / calls,
        "flat": low <= 0 and high < _MOST_MB_PER_HOUR * 1e6 / 3600,
        **environment(),
    }
    low, high = result["mb_per_hour_interval_95"]
    print(f"{calls} calls, {checks} checks, {result['resident_mb']:.1f} MB resident")
    print(
        f"memory grows by {result['mb_per_hour']:.2f} MB an hour (95 %: {low:.2f} to {high:.2f}), "
        f"at most {result['bytes_per_call_at_most']:.0f} bytes a call"
    )
    print(f"at most {most_threads} threads left by dropped caches")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if not result["flat"]:
        raise SystemExit("Memory grows, or the readings are too uneven to tell.")
    if most_threads:
        raise SystemExit("Threads are left.")


def give_back() -> None:
    """Returns to the system what the allocator merely keeps, where it can (glibc): it varies by megabytes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def reference(model) -> torch.Tensor:
    """A long answer, packed and reorganized in the background."""
    fine = dict(key_step=0.1, value_step=0.1, key_dense_channels=4)  # such as make it pay
    config = MosaicKVConfig(**_SMALL, **fine, reorganize="async", open_segment_length=128, reorganize_lag=16)
    cache = MosaicKVCache(config)
    tokens = _tokens(random.Random(-1), 2, 300)
    settings = dict(max_new_tokens=300, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(tokens))
    tokens = model.generate(tokens, cache=cache, **settings)
    assert cache.stats().segments and cache.stats().swaps
    return tokens


def call(model, choose: random.Random) -> torch.Tensor:
    """One conversation of one to three turns; its tokens."""
    preset = choose.choice(["default", "default", "paper", "lossless"])
    reorganize = choose.choice(["async", "off"])
    config = dataclasses.replace(MosaicKVConfig.preset(preset), **_SMALL, reorganize=reorganize, open_segment_length=64)
    cache = MosaicKVCache(config)
    batch = choose.choice([1, 1, 2, 4])
    tokens = _tokens(choose, batch, choose.choice([5, 60, 200, 700]))
    mask = torch.ones_like(tokens)
    mask[-1, : choose.choice([0, tokens.shape[1] // 3])] = 0
    beams = choose.choice([1, 1, 1, 2])
    for _ in range(choose.choice([1, 1, 3]) if beams == 1 else 1):
        new = choose.choice([1, 8, 60])
        settings = dict(max_new_tokens=new, do_sample=False, num_beams=beams, pad_token_id=0)
        tokens = model.generate(tokens, attention_mask=mask, cache=cache, **settings)
        tokens = torch.cat([tokens, _tokens(choose, len(tokens), 7)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
    return tokens


def _tokens(choose: random.Random, batch: int, length: int) -> torch.Tensor:
    return torch.tensor([[choose.randrange(3, 256) for _ in range(length)] for _ in range(batch)])


def binned(readings: list[list[float]]) -> list[tuple[float, float]]:
    """Medians of equal stretches of time: single readings depend on each other."""
    bins: dict[int, list[list[float]]] = {}
    for reading in readings:
        bins.setdefault(int(reading[0] / _BINS), []).append(reading)
    return [tuple(statistics.median(column) for column in zip(*own)) for own in bins.values()]


def drift(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean growth from point to point, in bytes a second, and its 95 % interval by Student's t.

    Args:
        points: `(seconds, bytes)`, evenly spaced.
    """
    if len(points) < 4:
        raise SystemExit("Too short to fit a drift: ask for more --minutes.")
    growth = [(size - before) / (now - then) for (then, before), (now, size) in pairwise(points)]
    interval = ttest_1samp(growth, 0).confidence_interval(0.95)
    return statistics.fmean(growth), float(interval.low), float(interval.high)


if __name__ == "__main__":
    main()
