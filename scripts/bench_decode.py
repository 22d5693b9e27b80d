"""Decoding with a whole model: time between tokens (TBT), throughput, and memory of the process.

The model has random weights in fp32 and the geometry of a real one, and its cache is filled with synthetic K and V,
so that long contexts need no prefill. Each method runs in a process of its own, so that its memory can be seen from
outside; one process at a time, and the methods take turns.

    python scripts/bench_decode.py --context 32768 --json benchmarks/decode-32k.json
    python scripts/bench_decode.py --throughput --json benchmarks/throughput.json
    python scripts/bench_decode.py --jitter --json benchmarks/jitter.json
    python scripts/bench_decode.py --prefill-peak --json benchmarks/prefill-peak.json

- Without a mode: TBT and memory of DynamicCache, QuantizedCache (4 bits, optimum-quanto) and MosaicKVCache.
- --throughput: tokens per second when the K and V may take as many bytes as two sequences in bf16.
- --jitter: how much slower than the median the slowest steps are, packing of new tokens included.
- --prefill-peak: the most memory that a prompt takes.
"""

import argparse
import dataclasses
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import machine_limits, peak_bytes, percentile, reset_peak, resident_bytes
from record import environment
from synthetic import dense_states
from transformers import AutoModelForCausalLM, Cache, DynamicCache, QuantizedCache, Qwen3Config
from transformers.utils import is_optimum_quanto_available

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

GEOMETRIES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 1024,
    },
}

_JITTER_STRETCH = 32
# Long enough that a warm-up packs, and so compiles, whatever the run itself will use.
_WARM_UP_CONTEXT = 2304


@dataclass
class Job:
    """What one process does; its result is a JSON object on the last line of its output."""

    task: str
    method: str
    geometry: str
    preset: str
    context: int
    steps: int
    warm_up: int
    batch: int = 1
    budget: int = 0
    """Bytes for K and V, where the batch is as large as they allow; 0 otherwise."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    for name in ("throughput", "jitter", "prefill-peak"):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name.replace("-", "_"))
    mode.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--model-geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    parser.add_argument("--preset", default="default", help="preset of MosaicKVCache (default: default)")
    methods = ("dynamic", "quantized", "mosaic")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, help="caches to compare")
    parser.add_argument("--context", type=int, help="tokens (default 32768; throughput 16384, jitter 4096, peak 8192)")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each method (default 5)")
    parser.add_argument("--steps", type=int, help="tokens decoded in each process (default 16, jitter 512)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    if args.job:
        print(json.dumps(work(Job(**json.loads(args.job)))))
        return

    modes = {"throughput": throughput, "jitter": jitter, "prefill_peak": prefill_peak, None: decode}
    setting = {
        "benchmark": args.mode or "decode",
        "geometry": args.model_geometry,
        "preset": args.preset,
        "rounds": args.rounds,
    }
    result = {**setting, **modes[args.mode](args), **machine_limits()}
    if args.json:
        args.json.write_text(json.dumps({**result, **environment()}, indent=2) + "\n")


# --- The modes --------------------------------------------------------------------------------------------------------


def decode(args: argparse.Namespace) -> dict:
    """TBT and memory of every method."""
    job = make_job(args, "decode", context=32768)
    methods = list(args.methods)
    if "quantized" in methods and not is_optimum_quanto_available():
        print("QuantizedCache is left out: it needs optimum-quanto (pip install optimum-quanto).")
        methods.remove("quantized")
    runs = take_turns({method: dataclasses.replace(job, method=method) for method in methods}, args.rounds)
    rows = {method: summarize(results) for method, results in runs.items()}
    tokens = runs[methods[-1]][0]["tokens"]
    bf16 = tokens * kv_bytes_bf16(args.model_geometry)
    print(
        f"{args.model_geometry}, {job.context:,} tokens, preset {args.preset}; as bf16 they take {bf16 / 1e6:,.0f} MB\n"
    )
    print(f"{'':<12}{'TBT ms':>10}{'p99':>10}{'tokens/s':>10}{'KV MB':>10}{'ratio':>8}{'peak MB':>10}")
    for method, row in rows.items():
        row["memory_ratio_process"] = bf16 / row["process_growth_bytes"]
        print(
            f"{method:<12}{row['tbt_median_ms']:>10.1f}{row['tbt_p99_ms']:>10.1f}{row['tokens_per_second']:>10.2f}"
            f"{row['process_growth_bytes'] / 1e6:>10,.0f}{row['memory_ratio_process']:>8.2f}"
            f"{row['peak_growth_bytes'] / 1e6:>10,.0f}"
        )
    result = {"context": job.context, "tokens": tokens, "kv_bytes_bf16": bf16, "methods": rows}
    if "mosaic" in rows:
        result["memory_ratio_process"] = rows["mosaic"]["memory_ratio_process"]
        for method, key in (("dynamic", "tbt_speedup"), ("quantized", "tbt_speedup_vs_quantized")):
            if method in rows:
                result[key] = rows[method]["tbt_median_ms"] / rows["mosaic"]["tbt_median_ms"]
                print(f"{key}: {result[key]:.2f}")
    return result


def throughput(args: argparse.Namespace) -> dict:
    """Tokens per second of as many sequences as fit."""
    job = make_job(args, "decode", context=16384)
    budget = 2 * job.context * kv_bytes_bf16(args.model_geometry)
    jobs = {
        "dynamic": dataclasses.replace(job, method="dynamic", batch=2),
        "mosaic": dataclasses.replace(job, method="mosaic", budget=budget),
    }
    runs = take_turns(jobs, args.rounds)
    rows = {method: summarize(results) for method, results in runs.items()}
    print(f"{args.model_geometry}, {job.context:,} tokens, preset {args.preset}; {budget / 1e6:,.0f} MB for K and V\n")
    print(f"{'':<12}{'sequences':>10}{'TBT ms':>10}{'tokens/s':>10}{'KV MB':>10}")
    for method, row in rows.items():
        row["sequences"] = runs[method][0]["batch"]
        # What two sequences in fp32 hold is counted as if it were bf16.
        row["cache_bytes"] = row["cache_bytes"] or budget
        print(
            f"{method:<12}{row['sequences']:>10}{row['tbt_median_ms']:>10.1f}{row['tokens_per_second']:>10.2f}"
            f"{row['cache_bytes'] / 1e6:>10,.0f}"
        )
    speedup = rows["mosaic"]["tokens_per_second"] / rows["dynamic"]["tokens_per_second"]
    print(f"throughput_speedup: {speedup:.2f}")
    return {"context": job.context, "budget_bytes": budget, "throughput_speedup": speedup, "methods": rows}


def jitter(args: argparse.Namespace) -> dict:
    """p99 over median of TBT, both caches in turn in one process."""
    job = make_job(args, "jitter", context=4096, steps=512)
    (samples,) = take_turns({"both": job}, 1)["both"]
    rows = {
        method: {
            "tbt_median_ms": 1e3 * statistics.median(tbt),
            "tbt_p99_ms": 1e3 * percentile(tbt, 99),
            "tbt_max_ms": 1e3 * max(tbt),
            "p99_over_median": percentile(tbt, 99) / statistics.median(tbt),
            "tbt_ms": [round(1e3 * seconds, 3) for seconds in tbt],
        }
        for method, tbt in samples.items()
    }
    print(f"{args.model_geometry}, {job.context:,} tokens and {job.steps} more, preset {args.preset}\n")
    print(f"{'':<12}{'TBT ms':>10}{'p99':>10}{'max':>10}{'p99/median':>12}")
    for method, row in rows.items():
        print(
            f"{method:<12}{row['tbt_median_ms']:>10.1f}{row['tbt_p99_ms']:>10.1f}{row['tbt_max_ms']:>10.1f}"
            f"{row['p99_over_median']:>12.2f}"
        )
    ratio = rows["mosaic"]["p99_over_median"] / rows["dynamic"]["p99_over_median"]
    print(f"jitter_ratio: {ratio:.2f}")
    return {"context": job.context, "steps": job.steps, "jitter_ratio": ratio, "methods": rows}


def prefill_peak(args: argparse.Namespace) -> dict:
    """The most memory during a prompt, weights and what the process had before taken off."""
    job = make_job(args, "prefill", context=8192)
    runs = take_turns(
        {method: dataclasses.replace(job, method=method) for method in ("dynamic", "mosaic")}, args.rounds
    )
    names = ("peak_growth_bytes", "process_growth_bytes", "seconds")
    rows = {method: medians(results, names) for method, results in runs.items()}
    print(f"{args.model_geometry}, prompt of {job.context:,} tokens, preset {args.preset}\n")
    print(f"{'':<12}{'peak MB':>10}{'after MB':>10}{'s':>8}")
    for method, row in rows.items():
        print(
            f"{method:<12}{row['peak_growth_bytes'] / 1e6:>10,.0f}{row['process_growth_bytes'] / 1e6:>10,.0f}"
            f"{row['seconds']:>8.1f}"
        )
    ratio = rows["mosaic"]["peak_growth_bytes"] / rows["dynamic"]["peak_growth_bytes"]
    print(f"prefill_peak_ratio: {ratio:.2f}")
    return {"context": job.context, "prefill_peak_ratio": ratio, "methods": rows}


def make_job(args: argparse.Namespace, task: str, context: int, steps: int = 16) -> Job:
    return Job(
        task=task,
        method="mosaic",
        geometry=args.model_geometry,
        preset=args.preset,
        context=args.context or context,
        steps=args.steps or steps,
        warm_up=4,
    )


def take_turns(jobs: dict[str, Job], rounds: int) -> dict[str, list[dict]]:
    """Results of every job in each round, a process each."""
    results = {name: [] for name in jobs}
    for turn in range(rounds):
        for name, job in jobs.items():
            print(f"round {turn + 1} of {rounds}: {name}", end="    \r", flush=True, file=sys.stderr)
            results[name].append(run(job))
    print(file=sys.stderr)
    return results


def run(job: Job) -> dict:
    """The job's result, from a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--job", json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The {job.method} process ended with {done.returncode}: {job}")
    return json.loads(done.stdout.splitlines()[-1])


def summarize(results: list[dict]) -> dict:
    """One method's figures over all its processes."""
    tbt = [seconds for result in results for seconds in result["tbt"]]
    median = statistics.median(tbt)
    return {
        "tbt_median_ms": 1e3 * median,
        "tbt_p99_ms": 1e3 * percentile(tbt, 99),
        "tokens_per_second": results[0]["batch"] / median,
        **medians(results, ("process_growth_bytes", "peak_growth_bytes", "cache_bytes")),
        "tbt_median_ms_by_round": [1e3 * statistics.median(result["tbt"]) for result in results],
    }


def medians(results: list[dict], names: tuple[str, ...]) -> dict:
    return {name: statistics.median(result[name] for result in results) for name in names}


def kv_bytes_bf16(geometry: str) -> int:
    """Bytes of a token's K and V in all layers, as bf16."""
    shape = GEOMETRIES[geometry]
    return shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2 * 2


# --- What a process does ----------------------------------------------------------------------------------------------


@torch.no_grad()
def work(job: Job) -> dict:
    """Does a job in this process."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **GEOMETRIES[job.geometry], tie_word_embeddings=True, max_position_embeddings=job.context + 4096
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return {"decode": work_decode, "jitter": work_jitter, "prefill": work_prefill}[job.task](job, model)


def work_decode(job: Job, model) -> dict:
    """Fills a cache, decodes, and tells times and memory."""
    batch = job.batch
    if job.budget:
        batch = max(1, job.budget // bytes_per_sequence(job, model))
    # Compiles kernels and makes the buffers that every method needs, before memory is looked at.
    small = filled_cache(job, model, batch, min(job.context, _WARM_UP_CONTEXT))
    steps(model, small, batch, job.warm_up)
    del small
    before = resident_bytes()
    cache = filled_cache(job, model, batch, job.context)
    resident_bytes()  # gives back what filling has left, so that it does not count in the peak
    reset_peak()
    tbt = steps(model, cache, batch, job.warm_up + job.steps)[job.warm_up :]
    peak = peak_bytes()
    return {
        "tbt": tbt,
        "batch": batch,
        "tokens": batch * cache.get_seq_length(),
        "process_growth_bytes": resident_bytes() - before,
        "peak_growth_bytes": peak - before,
        "cache_bytes": cache.stats().bytes if job.method == "mosaic" else 0,
    }


def work_jitter(job: Job, model) -> dict:
    """Decodes with both caches in alternating stretches."""
    caches = {}
    for method in ("dynamic", "mosaic"):
        caches[method] = filled_cache(dataclasses.replace(job, method=method), model, 1, job.context)
        steps(model, caches[method], 1, MosaicKVConfig.preset(job.preset).buffer_tokens)
    tbt = {method: [] for method in caches}
    while len(tbt["mosaic"]) < job.steps:
        for method, cache in caches.items():
            stretch = min(_JITTER_STRETCH, job.steps - len(tbt[method]))
            tbt[method] += steps(model, cache, 1, stretch)
    return tbt


def work_prefill(job: Job, model) -> dict:
    """Takes a prompt, and tells the memory."""
    model(torch.randint(model.config.vocab_size, (1, _WARM_UP_CONTEXT)), cache=new_cache(job, model), logits_to_keep=1)
    ids = torch.randint(model.config.vocab_size, (1, job.context))
    cache = new_cache(job, model)
    before = resident_bytes()
    reset_peak()
    start = time.perf_counter()
    model(ids, cache=cache, logits_to_keep=1)
    seconds = time.perf_counter() - start
    peak = peak_bytes()
    return {
        "peak_growth_bytes": peak - before,
        "process_growth_bytes": resident_bytes() - before,
        "seconds": seconds,
        "tokens": cache.get_seq_length(),
    }


def new_cache(job: Job, model) -> Cache:
    """An empty cache with all its layers."""
    if job.method == "dynamic":
        return DynamicCache(config=model.config)
    if job.method == "quantized":
        return QuantizedCache(backend="quanto", config=model.config, nbits=4)
    return MosaicKVCache(job.preset, config=model.config)


def filled_cache(job: Job, model, batch: int, context: int) -> Cache:
    """A cache that holds `context` synthetic tokens; every layer a copy of the same, which no method makes use of."""
    cache = new_cache(job, model)
    states = dense_states(batch, model.config.num_key_value_heads, context, model.config.head_dim)
    if job.method != "mosaic":
        for layer in cache.layers:
            layer.update(*states)
        return cache
    cache.layers[0].fill(*states, [0] * batch)
    packed = pickle.dumps(cache.layers[0].rows)
    for layer in cache.layers[1:]:
        layer.lazy_initialization(*states)
        layer.rows, layer.starts = pickle.loads(packed), [0] * batch
        layer.stored_length = context
    return cache


def bytes_per_sequence(job: Job, model) -> int:
    """Bytes that a sequence takes in a `MosaicKVCache` when its raw buffers are full."""
    config = model.config
    cache = MosaicKVCache(job.preset, config=config)
    keys, values = dense_states(1, config.num_key_value_heads, job.context, config.head_dim)
    cache.layers[0].fill(keys, values, [0])
    raw_token = config.num_key_value_heads * config.head_dim * 2 * keys.element_size()
    room = cache.compression.buffer_tokens * raw_token
    return (cache.stats().bytes + room) * len(cache.layers)


def steps(model, cache: Cache, batch: int, count: int) -> list[float]:
    """Decodes greedily; the seconds of every step."""
    token = torch.ones(batch, 1, dtype=torch.long)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        token = model(token, cache=cache).logits[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
