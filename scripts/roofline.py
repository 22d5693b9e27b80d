"""What a decode step has to read, and the speedup that this bounds: `docs/roofline.md` from measured bytes.

    python scripts/roofline.py > docs/roofline.md

A decode step of attention does a few operations for each byte, far below what a GPU can do beside reading it, so the
time that its bytes take at the memory's bandwidth bounds it. Bytes of the presets are those of tensors that are really
packed: 16K synthetic tokens of a layer in Llama-3.1-8B's geometry (`synthetic.py`).
"""

import dataclasses

import torch
from synthetic import SyntheticStates, packed_sequence

from mosaickv_hf import MosaicKVConfig
from mosaickv_hf.attention.selection import num_chosen_blocks
from mosaickv_hf.segments import PackedSegment

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
WEIGHTS = 8.03e9 * 2
"""Bytes of Llama-3.1-8B's weights as bf16, which a step reads as well."""
CONTEXTS = {"128K": 131072, "1M": 1048576}
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}
PAGE = 16
"""Tokens of a page of sequence-only selection, whose key is a minimum and a maximum (Quest)."""
SAMPLE = 16384
PRESETS = ("default", "paper", "lossless")


def full(tokens: int) -> float:
    """Bytes that a step of full attention in bf16 reads of one layer's K and V."""
    return tokens * KV_HEADS * 2 * HEAD_DIM * 2


def sequence_only(tokens: int, ratio: float = 0.1) -> float:
    """The same with a tenth of the tokens, chosen by pages' minima and maxima in bf16."""
    return tokens / PAGE * KV_HEADS * 2 * HEAD_DIM * 2 + ratio * full(tokens)


def packed(tokens: int, index: float, row: float, config: MosaicKVConfig) -> float:
    """The same from packed K and V.

    Args:
        index: bytes a token and KV head that choosing blocks reads.
        row: bytes a token and KV head that attending to it reads.
    """
    blocks = tokens // config.block_size
    attended = num_chosen_blocks(tokens, blocks, config) * config.block_size
    rotations = 2 * KV_HEADS * HEAD_DIM * HEAD_DIM * -(-tokens // config.segment_length)
    raw = (config.sink_tokens + config.recent_window) * KV_HEADS * 2 * HEAD_DIM * 2
    return KV_HEADS * (tokens * index + attended * row) + rotations + raw


def measure(config: MosaicKVConfig) -> tuple[float, float]:
    """`packed`'s index and row, of synthetic tokens."""
    config = dataclasses.replace(config, reorganize="off")
    states = (SyntheticStates(kind, KV_HEADS, HEAD_DIM).take(SAMPLE).bfloat16() for kind in ("key", "value"))
    segment = packed_sequence(*states, config).segments[0]
    tokens = segment.length * KV_HEADS
    return _index_bytes(segment) / tokens, _row_bytes(segment) / tokens


def _index_bytes(segment: PackedSegment) -> int:
    return segment.keys.dense.nbytes if segment.block_means is None else segment.block_means.nbytes


def _row_bytes(segment: PackedSegment) -> int:
    states = (segment.keys, segment.values)
    return sum(t.nbytes for s in states for t in (s.dense, s.bitmap, s.values, s.offsets))


def document() -> str:
    """The page, as Markdown."""
    per_token = {name: measure(MosaicKVConfig.preset(name)) for name in PRESETS}
    lines = [
        "# Roofline of a decode step",
        "",
        "Made by `python scripts/roofline.py > docs/roofline.md`. No GPU was measured: these are bounds.",
        "",
        f"Llama-3.1-8B: {LAYERS} layers, {KV_HEADS} KV heads, head_dim {HEAD_DIM}, one sequence. A step of attention "
        "reads, for each layer,",
        "",
        f"- full attention in bf16: tokens x {KV_HEADS} heads x 2 (K, V) x {HEAD_DIM} x 2 bytes;",
        f"- sequence-only selection (Quest's): of every page of {PAGE} tokens a minimum and a maximum, {HEAD_DIM} x 2 "
        "bytes each, and K and V of a tenth of the tokens;",
        "- a preset: the index of all tokens, the packed rows of those it attends to (a tenth), rotations, and the raw "
        "sinks and window.",
        "",
        f"Bytes a token and KV head, measured on {SAMPLE:,} packed synthetic tokens (as bf16: {4 * HEAD_DIM}):",
        "",
        "| preset | index | attended row |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {index:.1f} | {row:.1f} |" for name, (index, row) in per_token.items()]
    for label, tokens in CONTEXTS.items():
        reads = {"full attention": full(tokens), "sequence-only": sequence_only(tokens)}
        reads |= {name: packed(tokens, *per_token[name], MosaicKVConfig.preset(name)) for name in PRESETS}
        lines += [
            "",
            f"## {label} tokens",
            "",
            "| method | MB a step, all layers | "
            + " | ".join(f"ms at {bandwidth / 1e12:.2f} TB/s ({gpu})" for gpu, bandwidth in BANDWIDTHS.items())
            + " | attention at most | a whole step at most |",
            "|---" * (4 + len(BANDWIDTHS)) + "|",
        ]
        for name, of_layer in reads.items():
            step = LAYERS * of_layer
            times = " | ".join(f"{1e3 * step / bandwidth:.3f}" for bandwidth in BANDWIDTHS.values())
            faster = reads["full attention"] / of_layer
            whole = (LAYERS * reads["full attention"] + WEIGHTS) / (step + WEIGHTS)
            lines.append(f"| {name} | {step / 1e6:,.0f} | {times} | {faster:.1f}x | {whole:.1f}x |")
    lines += [
        "",
        f"A whole step reads the weights as well ({WEIGHTS / 1e9:.1f} GB), once for all sequences of a batch: with "
        "batches the last column moves towards the one before it.",
        "",
        "The paper reports attention up to 16x faster than FlashAttention; its setting's bound above holds that. "
        "Scores read K's dense channels of every token in the default preset, means of eight in the paper's: the "
        "index is about half of what the default reads, so a coarser first pass is what would raise its bound.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with torch.no_grad():
        print(document(), end="")
