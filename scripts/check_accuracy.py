"""Needle questions under each method against DynamicCache: answers right, KL divergence, measured bytes.

    python scripts/check_accuracy.py --json benchmarks/accuracy-smollm2.json
    python scripts/check_accuracy.py --methods default,quantized --samples 5

Methods are those of `eval.methods`: presets, files of a config, Transformers' QuantizedCache, and other papers'. Each
prompt is prefilled once; every method gets that prefill. A method is asked twice: it answers greedily on its own, and
it is fed the full cache's answer token by token, where KL(full || method) is taken after each token. Bytes are taken
after the prefill, those of other caches as if a float32 model's K and V were bf16.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from demo_model import load_model
from needle import make_needle, prompt_ids
from record import environment
from tqdm import tqdm
from transformers import Cache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval.methods import Prefill, configs, held_bytes, make_methods, prefill_cache

TASKS = ((2048, 4), (4096, 1))
"""Prompt tokens and keys: what SmolLM2-135M can do."""


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--methods", default="default,paper", help="by comma (default: default,paper)")
    parser.add_argument("--samples", type=int, default=20, help="prompts of each task (default 20)")
    parser.add_argument("--seed", type=int, default=1000, help="first seed; below 1000 is for development")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()

    model, tokenizer = load_model(args.model)
    names = ["full", *args.methods.split(",")]
    methods = make_methods(names)
    right = {name: [] for name in methods}
    kl = {name: [] for name in methods}
    ratio_4k = {name: [] for name in methods}

    prompts = [(*task, args.seed + i) for task in TASKS for i in range(args.samples)]
    for length, keys, seed in tqdm(prompts, unit="prompt"):
        needle = make_needle(tokenizer, length, keys, seed)
        raw = prefill_cache()
        logits = model(prompt_ids(tokenizer, needle.text), cache=raw, logits_to_keep=1).logits[0, -1]
        prefill = Prefill(raw, model.config)
        full = methods["full"](prefill)
        bf16 = held_bytes(full)
        answer, truth = greedy(model, tokenizer, logits, full)
        for name, method in methods.items():
            # Made twice: Transformers' QuantizedCache cannot be copied.
            own, _ = greedy(model, tokenizer, logits, method(prefill))
            cache = method(prefill)
            if length == 4096:
                ratio_4k[name].append(bf16 / held_bytes(cache))
            right[name].append(needle.answer in tokenizer.decode(own))
            kl[name].append(divergence(model, answer, truth, cache))

    measured = {
        name: {
            "right": sum(right[name]),
            "kl": statistics.fmean(kl[name]),
            "ratio_4k": statistics.fmean(ratio_4k[name]),
            "kl_by_prompt": kl[name],
        }
        for name in methods
    }
    print(f"{'method':<12}{'right':>12}{'KL':>10}{'ratio at 4K':>14}")
    for name, m in measured.items():
        print(f"{name:<12}{m['right']:>6} of {len(prompts):<3}{m['kl']:>9.4f}{m['ratio_4k']:>14.2f}")
    if args.json:
        result = {"n": len(prompts), "seed": args.seed, "methods": measured, "configs": configs(names)}
        args.json.write_text(json.dumps({**result, **environment()}, indent=2) + "\n")


def greedy(model, tokenizer, logits: torch.Tensor, cache: Cache, max_new_tokens: int = 16):
    """The answer's token ids, and the log probabilities after each but the last: `[len(answer) - 1, vocabulary]`."""
    answer, log_probs = [int(logits.argmax())], []
    while answer[-1] != tokenizer.eos_token_id and len(answer) < max_new_tokens:
        log_probs.append(step(model, answer[-1], cache))
        answer.append(int(log_probs[-1].argmax()))
    return answer, torch.stack(log_probs) if log_probs else logits.new_zeros(0, len(logits))


def divergence(model, answer: list[int], truth: torch.Tensor, cache: Cache) -> float:
    """Mean KL(full || method) over the steps that feed full's answer."""
    ours = torch.stack([step(model, token, cache) for token in answer[: len(truth)]])
    return float((truth.exp() * (truth - ours)).sum(-1).mean())


def step(model, token: int, cache: Cache) -> torch.Tensor:
    """Log probabilities `[vocabulary]` after one more token."""
    return model(torch.tensor([[token]]), cache=cache).logits[0, -1].log_softmax(-1)


if __name__ == "__main__":
    main()
