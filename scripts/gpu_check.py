"""What only a GPU can tell, in one command of a few minutes: whether the Triton kernels are right, and how fast.

    python scripts/gpu_check.py --out benchmarks

1. Every kernel against its oracle, on the device.
2. Decode attention of one layer in Llama-3.1-8B's geometry against `scaled_dot_product_attention` and, if it is
   installed, FlashAttention: contexts from 32K to 1M, batches of 1, 4 and 8, 6.25 %, 10 % and 12.5 % of the tokens.
3. Time between tokens of a model of that geometry with few layers and random weights.

Prints tables and writes gpu.json. Without a GPU it says so and ends with status 2.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from record import environment
from synthetic import SyntheticStates, packed_sequence

from mosaickv_hf import MosaicKVCache, MosaicKVConfig
from mosaickv_hf.attention import dispatch, reference
from mosaickv_hf.compression import packing
from mosaickv_hf.sequence import SequenceStore

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CONTEXTS = (32768, 131072, 524288, 1048576)
BATCHES = (1, 4, 8)
RATIOS = (0.0625, 0.1, 0.125)
ROUNDS, WARM_UP = 20, 5
# Beyond this much dense K and V a point is left out.
MEMORY_SHARE = 0.35


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for gpu.json (default: $OUT)")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no further point after this (default 7)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing is checked.", file=sys.stderr)
        sys.exit(2)
    deadline = time.monotonic() + 60 * args.minutes
    result = {"device": torch.cuda.get_device_name(), **environment()}
    with torch.no_grad():
        for name, part in (("correct", correctness), ("attention", attention), ("tbt", time_between_tokens)):
            try:
                result[name] = part(deadline)
            except Exception as error:  # the other parts still say something
                result[name] = {"error": repr(error)}
                print(f"{name} failed: {error!r}", file=sys.stderr)
            if args.out:
                Path(args.out).mkdir(parents=True, exist_ok=True)
                (Path(args.out) / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
    if any(isinstance(result[name], dict) for name in ("correct", "attention", "tbt")):
        sys.exit(1)
    if any(case["error"] > case["limit"] for case in result["correct"]):
        sys.exit(1)


# --- Right? -----------------------------------------------------------------------------------------------------------


def correctness(deadline: float) -> list[dict]:
    """Largest differences from the oracles, which run on the CPU."""
    cases = []
    print(f"{'case':<64}{'error':>12}")
    presets = {
        "default": {},
        "paper": MosaicKVConfig.preset("paper").to_dict(),
        "lossless": MosaicKVConfig.preset("lossless").to_dict(),
        "3 bits": {"key_bits": 3, "value_bits": 3},
        "8 and 2 bits, groups of 2": {"key_bits": 8, "value_bits": 2, "group_size": 2, "value_dense_channels": 8},
    }
    small = {"min_attended_tokens": 64, "buffer_tokens": 32, "min_segment_length": 256, "reorganize": "off"}
    kinds = itertools.product(presets.items(), (64, 128, 256), (1, 4), (1, 5), (torch.float32, torch.bfloat16))
    for (name, fields), head_dim, group, queries, dtype in kinds:
        config = MosaicKVConfig(**{**fields, **small})
        host = _sequence(config, (1000, 333), head_dim, dtype, "cpu")
        device = _sequence(config, (1000, 333), head_dim, dtype, "cuda")
        query = torch.randn(KV_HEADS, group, queries, head_dim) * head_dim**-0.5
        mask = None if group == 1 else torch.rand(KV_HEADS, group, queries, host.length) > 0.2
        expected = reference.attend(query, host, mask, config)
        actual = dispatch.attend(query.cuda(), device, None if mask is None else mask.cuda(), config).cpu()
        # Blocks that score alike may be chosen otherwise, and steps may round otherwise when packing.
        error = float((actual - expected).norm() / expected.norm())
        label = f"attend: {name}, D {head_dim}, group {group}, {queries} queries, {str(dtype)[6:]}"
        cases.append({"case": label, "error": error, "limit": 2e-2})
        print(f"{label:<64}{error:>12.2e}", flush=True)
    for (name, fields), head_dim in itertools.product(presets.items(), (64, 128, 256)):
        config = MosaicKVConfig(**{**fields, **small})
        segment = _sequence(config, (1000,), head_dim, torch.float32, "cuda").segments[0]
        blocks = torch.arange(segment.num_blocks, device="cuda").expand(KV_HEADS, -1)
        states = SyntheticStates("key", KV_HEADS, head_dim).take(1000)
        rotated = segment.keys.basis.rotate(states.cuda())
        kept = packing.unpack_blocks(segment.keys, blocks)[:, :1000]
        oracle = packing.pack(
            states.cuda(),
            segment.keys.basis,
            selection=config.selection,
            channel_ratio=config.key_channel_ratio,
            dead_zone=config.dead_zone,
            group_size=config.group_size,
            block_size=config.block_size,
        )
        error = float((kept - packing.unpack_blocks(oracle, blocks)[:, :1000]).norm() / rotated.norm())
        label = f"pack: {name}, D {head_dim}"
        cases.append({"case": label, "error": error, "limit": 1e-3})
        print(f"{label:<64}{error:>12.2e}", flush=True)
    return cases


def _sequence(config: MosaicKVConfig, lengths, head_dim: int, dtype: torch.dtype, device: str) -> SequenceStore:
    sequence = SequenceStore()
    keys, values = (SyntheticStates(kind, KV_HEADS, head_dim) for kind in ("key", "value"))
    for length in lengths:
        count = length + (config.sink_tokens if sequence.sinks is None else 0)
        sequence.buffer.append(*(states.take(count).to(device, dtype) for states in (keys, values)))
        # Queries of its own for each device would choose other steps.
        queries = torch.randn(KV_HEADS, 1, 8, head_dim, generator=torch.Generator().manual_seed(0)) * head_dim**-0.5
        sequence.pack(length // config.block_size * config.block_size, config, queries.to(device))
    return sequence


# --- Fast? ------------------------------------------------------------------------------------------------------------


def attention(deadline: float) -> list[dict]:
    """Milliseconds of a decode step of attention in one layer."""
    rows = []
    titles = (("context", 9), ("batch", 7), ("preset", 10), ("tokens", 9), ("SDPA ms", 10), ("flash ms", 10))
    print("\n" + "".join(f"{title:>{width}}" for title, width in (*titles, ("ours ms", 10), ("x", 7))))
    memory = torch.cuda.get_device_properties(0).total_memory
    for context in CONTEXTS:
        keys, values = (SyntheticStates(kind, KV_HEADS, HEAD_DIM).take(context).bfloat16() for kind in ("key", "value"))
        sequences = {}
        for name in ("default", "paper"):
            config = dataclasses.replace(MosaicKVConfig.preset(name), reorganize="off")
            sequences[name] = packed_sequence(keys.cuda(), values.cuda(), config), config
        for batch in BATCHES:
            if time.monotonic() > deadline:
                return rows
            if batch * 2 * keys.nbytes > MEMORY_SHARE * memory:
                continue
            dense = [states.cuda()[None].repeat(batch, 1, 1, 1) for states in (keys, values)]
            query = torch.randn(batch, QUERY_HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            grouped = query.unflatten(1, (KV_HEADS, -1)) * HEAD_DIM**-0.5
            sdpa = _milliseconds(lambda: F.scaled_dot_product_attention(query, *dense, enable_gqa=True))  # noqa: B023
            flash = _flash(query, *dense)
            for (name, (sequence, config)), ratio in itertools.product(sequences.items(), RATIOS):
                changed = dataclasses.replace(config, token_ratio=ratio, min_attended_tokens=0)

                def step():
                    for row in grouped:  # noqa: B023
                        dispatch.attend(row, sequence, None, changed)  # noqa: B023

                ours = _milliseconds(step)
                best = min(x for x in (sdpa, flash) if x is not None)
                row = {"context": context, "batch": batch, "preset": name, "token_ratio": ratio}
                rows.append(row | {"sdpa_ms": sdpa, "flash_ms": flash, "ours_ms": ours, "speedup": best / ours})
                shown = f"{flash:>10.3f}" if flash is not None else f"{'-':>10}"
                at = f"{context:>9,}{batch:>7}{name:>10}{ratio:>9.2%}"
                print(f"{at}{sdpa:>10.3f}{shown}{ours:>10.3f}{best / ours:>7.1f}", flush=True)
    return rows


def _flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> float | None:
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    query, keys, values = (x.transpose(1, 2).contiguous() for x in (query, keys, values))
    return _milliseconds(lambda: flash_attn_with_kvcache(query, keys, values))


def _milliseconds(step: Callable[[], object]) -> float:
    times = []
    for turn in range(WARM_UP + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        if turn >= WARM_UP:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def time_between_tokens(deadline: float) -> list[dict]:
    """Milliseconds between tokens of four layers of Llama-3.1-8B's geometry, random weights."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1 << 20,
        vocab_size=32000,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().eval()
    rows = []
    print(f"\n{'context':>9}{'DynamicCache ms':>18}{'MosaicKVCache ms':>19}")
    for context in (32768, 131072):
        if time.monotonic() > deadline:
            break
        ids = torch.randint(0, 32000, (1, context), device="cuda")
        times = {}
        for name, cache in (("dynamic", DynamicCache()), ("mosaic", MosaicKVCache())):
            for part in ids.split(8192, dim=1):
                model(part, past_key_values=cache, logits_to_keep=1)
            token = ids[:, :1]
            times[name] = _milliseconds(lambda: model(token, past_key_values=cache))  # noqa: B023
        rows.append({"context": context, **{f"{name}_ms": value for name, value in times.items()}})
        print(f"{context:>9,}{times['dynamic']:>18.2f}{times['mosaic']:>19.2f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
