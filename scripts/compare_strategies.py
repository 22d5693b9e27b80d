"""One strategy for every layer and head, or one chosen for each by the loss it makes: KL at equal bytes.

    python scripts/compare_strategies.py --json benchmarks/strategies.json

Single strategies (how K's steps relate to V's, how many channels are dense, bits) give all heads the same steps and
bits. The five best of them on the first prompts, of seeds below 1000, meet the chooser (`MosaicKVConfig.adapt_steps`,
steps and bits by what the prompt's newest queries make of them) on others, of seeds from 1000. All fit one
`memory_budget`, and their bytes are measured. KL(full || method) is taken along full's answers, on needle questions.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from check_accuracy import divergence, greedy
from demo_model import load_model
from needle import make_needle, prompt_ids
from record import environment
from tqdm import tqdm

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

CHOOSER = "chooser"
FINALISTS = 5
_RESAMPLES = 10_000


def singles(budget: float) -> dict[str, MosaicKVConfig]:
    """By name, what a user who sets one strategy could choose from."""
    found = {}
    for ratio, key_dense, value_dense, bits in itertools.product((1, 2, 3), (8, 16, 24), (0, 8), (4, 8)):
        name = f"V {ratio} x K's step, {key_dense} + {value_dense} dense, {bits} bits"
        found[name] = MosaicKVConfig(
            adapt_steps=False,
            key_step=0.62,
            value_step=0.62 * ratio,
            key_dense_channels=key_dense,
            value_dense_channels=value_dense,
            key_bits=bits,
            value_bits=bits,
            memory_budget=budget,
        )
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--budget", type=float, default=0.22, help="share of bf16's bytes (default 0.22)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompts (default 2048)")
    parser.add_argument("--keys", type=int, default=4, help="needles in a prompt (default 4)")
    parser.add_argument("--develop", type=int, default=8, help="prompts to pick the five with (default 8)")
    parser.add_argument("--samples", type=int, default=20, help="prompts to compare on (default 20)")
    parser.add_argument("--develop-seed", type=int, default=100, help="first seed of the former (default 100)")
    parser.add_argument("--seed", type=int, default=1000, help="first seed of the latter (default 1000)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)

    def measure(configs: dict[str, MosaicKVConfig], seed: int, count: int) -> dict[str, dict]:
        needles = (make_needle(tokenizer, args.tokens, args.keys, seed + i) for i in range(count))
        return run(model, tokenizer, tqdm(needles, total=count, unit="prompt"), configs)

    candidates = singles(args.budget)
    developed = measure(candidates, args.develop_seed, args.develop)
    best = sorted(candidates, key=lambda name: statistics.fmean(developed[name]["kl"]))[:FINALISTS]
    rivals = {CHOOSER: MosaicKVConfig(memory_budget=args.budget), **{name: candidates[name] for name in best}}
    tested = measure(rivals, args.seed, args.samples)

    chosen = tested[CHOOSER]["kl"]
    rows = {}
    for name, found in tested.items():
        ahead = [theirs - ours for theirs, ours in zip(found["kl"], chosen)]
        rows[name] = {
            "kl": statistics.fmean(found["kl"]),
            "kl_by_prompt": found["kl"],
            "share_of_bf16": statistics.fmean(found["share"]),
            "kl_more_than_chooser": statistics.fmean(ahead),
            "interval_95": bootstrap(ahead),
            "config": rivals[name].to_dict(),
        }
    print(f"{'strategy':<44}{'KL':>9}{'bytes/bf16':>12}{'more than the chooser (95 %)':>32}")
    for name, row in rows.items():
        low, high = row["interval_95"]
        more = "" if name == CHOOSER else f"{row['kl_more_than_chooser']:.4f} ({low:.4f} to {high:.4f})"
        print(f"{name:<44}{row['kl']:>9.4f}{row['share_of_bf16']:>12.4f}{more:>32}")
    if args.json:
        about = {name: value for name, value in vars(args).items() if name not in ("model", "json")}
        on_development = {name: statistics.fmean(found["kl"]) for name, found in developed.items()}
        result = {"strategies": rows, "kl_on_development": on_development, **about, **environment()}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def run(model, tokenizer, needles: Iterator, configs: dict[str, MosaicKVConfig]) -> dict[str, dict[str, list[float]]]:
    """By config, "kl" and "share" (of bf16's bytes) of every prompt. Each prompt is prefilled once."""
    found = {name: {"kl": [], "share": []} for name in configs}
    for needle in needles:
        raw = MosaicKVCache("raw")
        logits = model(prompt_ids(tokenizer, needle.text), cache=raw, logits_to_keep=1).logits[0, -1]
        answer, truth = greedy(model, tokenizer, logits, raw.to_dynamic_cache())
        for name, config in configs.items():
            # Selection of tokens is another matter: all are attended to.
            cache = MosaicKVCache.from_cache(raw, compression=dataclasses.replace(config, token_ratio=1.0))
            found[name]["share"].append(1 / cache.stats().ratio)
            found[name]["kl"].append(divergence(model, answer, truth, cache))
    return found


def bootstrap(differences: list[float]) -> tuple[float, float]:
    """95 % interval of the mean of paired differences, from resampled prompts."""
    values = torch.tensor(differences)
    picks = torch.randint(len(values), (_RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = values[picks].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


if __name__ == "__main__":
    main()
