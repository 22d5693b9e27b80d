"""Compiles every Triton kernel for the GPUs we name, without one, and says what the compilers made of it.

    python scripts/check_triton_build.py --json build.json

Shapes and tile sizes are those of Llama-3.1-8B (8 KV heads of 4 query heads, head_dim 128) in the default and the
paper preset. Registers, spilled bytes, shared memory and the widest load from global memory come from the machine code:
on NVIDIA from the tools in Triton's wheel, on AMD from the assembly and its metadata. Ends with status 1 if a kernel
spills on sm_90.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from record import environment
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mosaickv_hf.triton_kernels import attention, packing, scores
from mosaickv_hf.triton_kernels.bits import BF16, QUANTIZED
from mosaickv_hf.triton_kernels.tables import StatesShape

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HEAD_DIM, BLOCK_SIZE, GROUP = 128, 8, 4

SHAPES = {
    "default": (StatesShape(16, 112, 14, 1, QUANTIZED, 16, 0), StatesShape(1, 127, 16, 1, QUANTIZED, 32, 0)),
    "default, 8 bits": (StatesShape(16, 112, 14, 1, QUANTIZED, 32, 0), StatesShape(1, 127, 16, 1, QUANTIZED, 64, 0)),
    "paper": (StatesShape(0, 128, 16, 1, BF16, 32, 32), StatesShape(0, 128, 16, 1, BF16, 32, 32)),
}


@dataclass(frozen=True)
class Build:
    """A kernel and what it is compiled with; `types` are those of the arguments that are not compile-time."""

    name: str
    kernel: object
    types: dict[str, str]
    constants: dict
    num_warps: int


def builds(precision: str) -> Iterator[Build]:
    """Every kernel at its production shapes."""
    for preset, (keys, values) in SHAPES.items():
        for use in ("decode", "prefill"):
            launch = dict(attention.launch_constants(BLOCK_SIZE))
            warps = launch.pop("num_warps")
            constants = attention.shape_constants(keys, values) | launch
            constants |= {"BLOCK_SIZE": BLOCK_SIZE, "SPLITS": 64, "SELECTED": use == "decode"}
            constants |= {"MASK": 0, "PRECISION": precision}
            types = _types(
                "table *i64, query *fp32, constant *fp32, chosen *i32, starts *i32, mask *i1, mask_head i64,"
                "mask_row i64, mask_token i64, tops *fp32, totals *fp32, outputs *fp32, heads i32, rows i32,"
                "num_segments i32, num_chosen i32"
            )
            name = f"packed_attention, {use}, {preset}"
            yield Build(name, attention.packed_attention_kernel, types, constants, warps)
    for name, channels, by_mean in (("principal", 16, False), ("mean", 32, True)):
        launch = dict(scores.launch_constants(GROUP, BLOCK_SIZE))
        warps = launch.pop("num_warps")
        constants = {"BLOCK_SIZE": BLOCK_SIZE, "CHANNELS": channels, "CHANNELS_PADDED": channels} | launch
        constants |= {"BY_MEAN": by_mean, "MASK": 0, "PRECISION": precision}
        types = _types(
            "table *i64, query *fp32, constant *fp32, mask *i1, mask_head i64, mask_row i64, mask_token i64,"
            "scores *fp32, heads i32, rows i32, total_blocks i32"
        )
        yield Build(f"block_scores, {name}", scores.block_scores_kernel, types, constants, warps)
    for preset, dense, by_rank in (("default", 16, False), ("paper", 0, True)):
        launch = dict(packing.launch_constants(HEAD_DIM))
        warps = launch.pop("num_warps")
        row_bytes = (HEAD_DIM - dense) // 8
        constants = {"HEAD_DIM": HEAD_DIM, "NUM_DENSE": dense, "GROUP_SIZE": 1, "ROW_BYTES": row_bytes} | launch
        types = _types(
            "rotated *fp32, offset *fp32, scale *fp32, step *fp32, bits *i32, dense_table *i64, dense *u8,"
            "bitmap *u8, units *i64, tokens i32, num_blocks i32, kept_groups i32, dead_zone fp32"
        )
        more = {"BLOCK_SIZE": BLOCK_SIZE, "DENSE_PADDED": max(dense, 1), "GROUPS": HEAD_DIM - dense}
        more |= {"GROUPS_PADDED": HEAD_DIM, "BY_RANK": by_rank, "PLAIN": by_rank}
        yield Build(f"select, {preset}", packing.select_kernel, types, constants | more, warps)
        types = _types(
            "rotated *fp32, step *fp32, bits *i32, bitmap *u8, starts *i64, values "
            + ("*fp32" if by_rank else "*i32")
            + ", tokens i32, num_rows i32"
        )
        more = {"BYTES_PADDED": 16, "PLAIN": by_rank}
        yield Build(f"encode, {preset}", packing.encode_kernel, types, constants | more, warps)


def _types(text: str) -> dict[str, str]:
    return dict(part.split() for part in text.split(","))


def check(build: Build, name: str, target: GPUTarget) -> dict:
    """Compiles for one target; what `--json` has of it."""
    signature = build.types | {constant: "constexpr" for constant in build.constants}
    # Torch's allocations are aligned, which the launcher would find out; sizes may be anything.
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(build.kernel, signature, build.constants, aligned)
    compiled = triton.compile(source, target=target, options={"num_warps": build.num_warps})
    about = _nvidia(compiled) if target.backend == "cuda" else _amd(compiled.asm["amdgcn"])
    return {"kernel": build.name, "target": name, "shared_bytes": compiled.metadata.shared, **about}


def _nvidia(compiled) -> dict:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        code = _output(tools / "nvdisasm", "-c", file.name)
    # The stack frame of a called function (a division) is no spill if nothing is stored there.
    stack = int(re.search(r"STACK:(\d+)", usage)[1]) if re.search(r"\b(?:STL|LDL)\b", code) else 0
    widths = [8 * _sass_bytes(options) for options in re.findall(r"\bLDG((?:\.\w+)*)", code)]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spill_bytes": stack,
        "max_load_bits": max(widths, default=0),
        "instructions": len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
    }


def _sass_bytes(options: str) -> int:
    for option, size in ((".128", 16), (".64", 8), (".U8", 1), (".S8", 1), (".U16", 2), (".S16", 2)):
        if option in options:
            return size
    return 4


def _amd(code: str) -> dict:
    def number(field: str) -> int:
        return int(re.search(rf"\.{field}:\s+(\d+)", code)[1])

    # A register of 64 lanes takes 256 bytes.
    spilled = 256 * number("vgpr_spill_count") + 4 * number("sgpr_spill_count")
    loads = re.findall(r"\b(?:global|buffer|flat)_load_(\w+)", code)
    return {
        "registers": number("vgpr_count"),
        "spill_bytes": spilled,
        "max_load_bits": max(map(_gcn_bits, loads), default=0),
        "instructions": len(re.findall(r"^\t[a-z]+_\w+", code, re.MULTILINE)),
    }


def _gcn_bits(kind: str) -> int:
    if match := re.match(r"dwordx(\d)|b(\d+)", kind):
        return 32 * int(match[1]) if match[1] else int(match[2])
    return 8 if "byte" in kind else 16 if "short" in kind else 32


def _output(*command) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the list of results to this file")
    parser.add_argument("--targets", default=",".join(TARGETS), help="by comma (default: all, %(default)s)")
    args = parser.parse_args()
    results = []
    columns = ("registers", "spill_bytes", "shared_bytes", "max_load_bits", "instructions")
    print(f"{'kernel':<43}{'target':<8}" + "".join(f"{column:>15}" for column in columns))
    for name in args.targets.split(","):
        target = TARGETS[name]
        for build in builds("tf32x3" if target.backend == "cuda" else "ieee"):
            results.append(check(build, name, target))
            numbers = "".join(f"{results[-1][column]:>15,}" for column in columns)
            print(f"{build.name:<43}{name:<8}{numbers}", flush=True)
    if args.json:
        made = environment()
        made["versions"]["triton"] = triton.__version__
        args.json.write_text(json.dumps([{**result, **made} for result in results], indent=2) + "\n")
    spilled = [r["kernel"] for r in results if r["target"] == "sm_90" and r["spill_bytes"]]
    if spilled:
        raise SystemExit(f"spills on sm_90: {', '.join(spilled)}")


if __name__ == "__main__":
    main()
