"""Decode attention of one layer against dense attention and against selection without compression.

Each method answers one query token over the same synthetic K and V (fp32, spectrum of a real model). Methods take
turns, so that a busy moment of the machine meets all of them; times are medians over the rounds.

    python scripts/bench_attention.py --geometry llama-3.1-8b --context 131072 --json benchmarks/attention-128k.json
    python scripts/bench_attention.py --grow --attended 4096 --json benchmarks/attention-growth.json

- transformers_sdpa: Transformers' own decode call on dense K and V.
- best_sdpa: the query heads of a group folded into rows, which is faster.
- sequence_only: page selection over dense rows (see `sequence_only.py`), as many tokens as ours selects.
- mosaickv: the package's attention to packed tokens, sinks and buffer.

"of limit" is the least time that the bytes would take at copy bandwidth or the multiply-adds at the rate of a large
matrix product, whichever is longer, as a share of the measured time; "limit" says which, for a stage of ours as well.
"""

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from measure import Limits, Times, interleave
from record import environment
from sequence_only import SequenceOnly
from synthetic import SyntheticStates, dense_states, packed_sequence
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mosaickv_hf import MosaicKVConfig
from mosaickv_hf.attention import dispatch
from mosaickv_hf.attention.selection import num_chosen_blocks
from mosaickv_hf.segments import PackedStates
from mosaickv_hf.sequence import SequenceStore

GEOMETRIES = {"llama-3.1-8b": (32, 8, 128), "qwen3-4b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
"""Query heads, KV heads, head_dim."""

GROWTH_CONTEXTS = (65536, 131072, 262144)

Cost = dict[str, tuple[int, int]]
"""Bytes read and multiply-adds of a step, by stage."""

_STAGES = ("score", "top_k", "attend")
_STAGE_OF_PHASE = {"prepare": "score", "score": "score", "select": "top_k", "attend": "attend", "merge": "attend"}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=131072, help="tokens (default 131072)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--preset", default="default", help="preset of MosaicKVConfig (default: default)")
    parser.add_argument("--attended", type=int, help="packed tokens to select, instead of the preset's share")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default 15)")
    parser.add_argument(
        "--grow", action="store_true", help="64K, 128K and 256K with the same number of tokens selected"
    )
    parser.add_argument("--contexts", help="with --grow: other contexts, by comma")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    if args.grow and args.attended is None:
        args.attended = 4096

    result = measure_growth(args) if args.grow else compare(args)
    if args.json:
        args.json.write_text(json.dumps({**result, **environment()}, indent=2) + "\n")


# --- The two measurements ---------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> dict:
    """All methods at one context."""
    query_heads, heads, head_dim = GEOMETRIES[args.geometry]
    config = make_config(args)
    keys, values = dense_states(args.batch, heads, args.context, head_dim, args.seed)
    built = time.perf_counter()
    sequences = [packed_sequence(k, v, config) for k, v in zip(keys, values)]
    built = time.perf_counter() - built
    attended = attended_tokens(sequences[0], config)
    pages = SequenceOnly(keys.flatten(0, 1), values.flatten(0, 1), attended)
    group = query_heads // heads
    query = make_query(args, group)

    dense = {"attend": (keys.nbytes + values.nbytes, 2 * query.numel() * args.context)}
    methods = {
        "transformers_sdpa": (transformers_sdpa(query, keys, values), dense),
        "best_sdpa": (best_sdpa(query, keys, values), dense),
        "sequence_only": (sequence_only(query, pages), pages.cost(group)),
        "mosaickv": (mosaickv(query, sequences, config), packed_cost(sequences, config, group)),
    }
    limits = Limits()
    times = interleave({name: step for name, (step, _) in methods.items()}, args.rounds, limits.measure)

    rows = {}
    ours = times["mosaickv"]["total"]
    for name, (_, cost) in methods.items():
        rows[name] = {"speedup_of_mosaickv": times[name]["total"] / ours, **judged(times[name], cost, limits)}
    print(
        f"{args.geometry}, {args.context:,} tokens, batch {args.batch}, preset {args.preset}: "
        f"{attended:,} tokens selected, packed in {built:.1f} s"
    )
    print_table(rows, limits)
    packed = sum(tensor.nbytes for segment in sequences[0].segments for _, tensor in segment.tensors())
    return {
        **setting(args),
        "context": args.context,
        "selected_tokens": attended,
        "speedup_vs_best_sdpa": times["best_sdpa"]["total"] / ours,
        "speedup_vs_transformers": times["transformers_sdpa"]["total"] / ours,
        "speedup_vs_sequence_only": times["sequence_only"]["total"] / ours,
        "ratio_packed": sequences[0].packed_length * heads * head_dim * 4 / packed,
        **limits.to_dict(),
        "methods": rows,
    }


def measure_growth(args: argparse.Namespace) -> dict:
    """Our method alone at several contexts, all with the same number of tokens selected."""
    query_heads, heads, head_dim = GEOMETRIES[args.geometry]
    config = make_config(args)
    contexts = [int(n) for n in args.contexts.split(",")] if args.contexts else list(GROWTH_CONTEXTS)
    query = make_query(args, query_heads // heads)
    steps, costs = {}, {}
    for context in contexts:
        # Row by row: dense states of a whole batch at 256K would not fit beside the rest.
        sequences = []
        for row in range(args.batch):
            keys, values = dense_states(1, heads, context, head_dim, args.seed + row)
            sequences.append(packed_sequence(keys[0], values[0], config))
            del keys, values
        steps[context] = mosaickv(query, sequences, config)
        costs[context] = packed_cost(sequences, config, query_heads // heads)
    limits = Limits()
    times = interleave(steps, args.rounds, limits.measure)
    rows = {str(context): judged(times[context], costs[context], limits) for context in contexts}
    growth = times[contexts[-1]]["total"] / times[contexts[0]]["total"]
    print(f"{args.geometry}, batch {args.batch}, preset {args.preset}, {args.attended:,} tokens selected")
    print_table(rows, limits)
    print(f"\n{contexts[-1]:,} tokens take {growth:.2f} times as long as {contexts[0]:,}.")
    return {
        **setting(args),
        "contexts": contexts,
        "selected_tokens": args.attended,
        "growth": growth,
        **limits.to_dict(),
        "by_context": rows,
    }


def judged(times: Times, cost: Cost, limits: Limits) -> dict:
    """A row of the result: milliseconds by stage, and how far all and each stage are from the machine's limits."""
    whole = tuple(map(sum, zip(*cost.values())))
    return {
        **{f"{stage}_ms": 1e3 * seconds for stage, seconds in times.items()},
        **limits.judge(times["total"], *whole),
        "stages": {stage: limits.judge(times[stage], *of_stage) for stage, of_stage in cost.items() if stage in times},
    }


def setting(args: argparse.Namespace) -> dict:
    return {
        "benchmark": "attention_growth" if args.grow else "attention",
        "geometry": args.geometry,
        "preset": args.preset,
        "batch": args.batch,
        "attended": args.attended,
        "rounds": args.rounds,
    }


def make_config(args: argparse.Namespace) -> MosaicKVConfig:
    config = MosaicKVConfig.preset(args.preset)
    if args.attended is None:
        return config
    return dataclasses.replace(config, token_ratio=1e-9, min_attended_tokens=args.attended)


def make_query(args: argparse.Namespace, group: int) -> torch.Tensor:
    """`[batch, num_kv_heads, group, head_dim]`: vectors like the keys of each row, the heads of a group unlike."""
    _, heads, head_dim = GEOMETRIES[args.geometry]
    sources = [SyntheticStates("key", heads, head_dim, args.seed + row) for row in range(args.batch)]
    return torch.stack([source.take(64 * group)[:, ::64] for source in sources])


# --- The methods: functions that take one decode step and tell the seconds of its stages ------------------------------


def transformers_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], Times]:
    """What a Transformers model does in a decode step without padding."""
    module = SimpleNamespace(num_key_value_groups=query.shape[2], is_causal=True)
    one = query.flatten(1, 2)[:, :, None]
    return _timed(lambda: sdpa_attention_forward(module, one, keys, values, None))


def best_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], Times]:
    return _timed(lambda: F.scaled_dot_product_attention(query, keys, values))


def _timed(step: Callable[[], object]) -> Callable[[], Times]:
    def timed() -> Times:
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        return {"attend": seconds, "total": seconds}

    return timed


def sequence_only(query: torch.Tensor, pages: SequenceOnly) -> Callable[[], Times]:
    scaled = query.flatten(0, 1) * query.shape[-1] ** -0.5

    def timed() -> Times:
        marks = [time.perf_counter()]
        pages.begin(scaled)
        for stage in (pages.score, pages.select, pages.attend):
            stage()
            marks.append(time.perf_counter())
        score, top_k, attend = (after - before for before, after in pairwise(marks))
        return {"score": score, "top_k": top_k, "attend": attend, "total": marks[-1] - marks[0]}

    return timed


def mosaickv(query: torch.Tensor, sequences: list[SequenceStore], config: MosaicKVConfig) -> Callable[[], Times]:
    """Our attention as a cache layer calls it, sequence by sequence."""
    scaled = query[:, :, :, None] * query.shape[-1] ** -0.5

    def timed() -> Times:
        with phase_times() as stages:
            start = time.perf_counter()
            for row, sequence in zip(scaled, sequences):
                dispatch.attend(row, sequence, None, config)
            return {**stages, "total": time.perf_counter() - start}

    return timed


@contextmanager
def phase_times() -> Iterator[Times]:
    """Seconds that the compiled phases take, by stage; nothing where attention does not run on them.

    `attend` has no hook for this, so the function that runs its phases is replaced meanwhile.
    """
    try:
        from mosaickv_hf.attention.cpu import attention
    except ImportError:
        yield {}
        return
    stages: Times = defaultdict(float)
    run = attention.run
    names = phase_names()

    def timed_run(phase: int, *args) -> None:
        start = time.perf_counter()
        run(phase, *args)
        stages[names.get(phase, "attend")] += time.perf_counter() - start

    attention.run = timed_run
    try:
        yield stages
    finally:
        attention.run = run


def phase_names() -> dict[int, str]:
    """Stages by the address of the compiled phase."""
    from mosaickv_hf.attention.cpu import scoring, softmax

    found = {}
    for module in (scoring, softmax):
        for phase, stage in _STAGE_OF_PHASE.items():
            address = getattr(getattr(module, phase, None), "address", None)
            if address is not None:
                found[address] = stage
    return found


# --- What a step has to read and to compute ---------------------------------------------------------------------------


def attended_tokens(sequence: SequenceStore, config: MosaicKVConfig) -> int:
    """Packed tokens that a KV head attends to in a step."""
    blocks = sum(segment.num_blocks for segment in sequence.segments)
    return num_chosen_blocks(sequence.packed_length, blocks, config) * config.block_size


def packed_cost(sequences: list[SequenceStore], config: MosaicKVConfig, group: int) -> Cost:
    """Cost of a step over sequences like the first one, with `group` query heads for each KV head.

    Kept elements count at their mean over the sequence, and once expanded: a multiply-add for each channel.
    """
    sequence = sequences[0]
    buffer_keys, buffer_values = sequence.buffer.states()
    raw = [buffer_keys, buffer_values, *(sequence.sinks or ())]
    heads, _, key_dim = buffer_keys.shape
    value_dim = buffer_values.shape[2]
    share = attended_tokens(sequence, config) / sequence.packed_length
    score_bytes = score_work = scores = 0
    num_bytes = sum(states.nbytes for states in raw)
    work = sum(states.numel() for states in raw) * group
    bases = set()
    for segment in sequence.segments:
        if share < 1:
            score_bytes += index_bytes(segment)
            channels = segment.keys.num_dense * segment.block_size
            if segment.block_means is not None:
                channels = segment.block_means.shape[2]
            score_work += heads * group * segment.num_blocks * channels
            scores += heads * group * segment.num_blocks
        num_bytes += round(share * (row_bytes(segment.keys) + row_bytes(segment.values)))
        work += round(share * heads * group * segment.length * (key_dim + value_dim))
        bases |= {segment.keys.basis, segment.values.basis}
    for basis in bases:
        if basis.rotation is not None:
            num_bytes += basis.rotation.nbytes
            work += group * basis.rotation.numel()
    # Choosing reads every score twice at least: for the softmax's normalizer, and to compare.
    cost = {"score": (score_bytes, score_work), "top_k": (8 * scores, scores), "attend": (num_bytes, work)}
    return {stage: tuple(len(sequences) * x for x in of_stage) for stage, of_stage in cost.items()}


def index_bytes(segment) -> int:
    """Bytes that scoring all blocks of a segment reads."""
    if segment.block_means is not None:
        return segment.block_means.nbytes
    return segment.keys.dense.nbytes


def row_bytes(states: PackedStates) -> int:
    """Bytes that attending to all tokens of K or V reads."""
    tensors = (states.dense, states.bitmap, states.values, states.offsets)
    return sum(tensor.nbytes for tensor in tensors)


def print_table(rows: dict[str, dict], limits: Limits) -> None:
    print(
        f"\n{'':<18}{'score':>9}{'top-k':>9}{'attend':>9}{'total ms':>10}{'speedup':>10}"
        f"{'MB read':>10}{'of bandw.':>11}{'limit':>15}{'of limit':>10}"
    )
    for name, row in rows.items():
        stages = "".join(f"{row[f'{stage}_ms']:>9.3f}" if f"{stage}_ms" in row else f"{'':>9}" for stage in _STAGES)
        speedup = f"{row['speedup_of_mosaickv']:.2f}x" if "speedup_of_mosaickv" in row else ""
        print(f"{name:<18}{stages}{row['total_ms']:>10.3f}{speedup:>10}{_limits_columns(row)}")
    for stage, of_stage in row["stages"].items():  # of the last row, which is ours
        print(f"{'  ' + stage:<18}{'':>47}{_limits_columns(of_stage)}")
    print(f"\ncopy {limits.bandwidth / 1e9:.1f} GB/s, {limits.rate / 1e9:.0f} billion multiply-adds a second")


def _limits_columns(row: dict) -> str:
    return (
        f"{row['bytes_read'] / 1e6:>10.1f}{row['share_of_bandwidth']:>11.0%}{row['limit']:>15}"
        f"{row['share_of_limit']:>10.0%}"
    )


if __name__ == "__main__":
    main()
