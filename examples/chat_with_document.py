"""Ask several questions about a long document that is read once, also after a restart.

    python examples/chat_with_document.py --text moby_dick.txt --cache moby_cache \\
        --question "Who tells the story?" --question "Why does he go to sea?"

The document is prefilled into a MosaicKVCache, which is saved. Every question goes on from a copy of it, so only the
question's own tokens are read; a second run loads the cache and reads nothing else.
"""

import argparse
import copy
import inspect
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mosaickv_hf import MosaicKVCache

_QUESTIONS = ("Who tells the story, and what is his name?", "Why does he want to go to sea?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat model's folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", type=Path, required=True, help="the document, a text file")
    parser.add_argument("--skip", type=int, default=0, help="characters to leave out in front (default 0)")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of it to read (default 6000)")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the saved cache; read if it is there")
    parser.add_argument("--question", action="append", help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=60, help="of an answer (default 60)")
    args = parser.parse_args()

    model_id = args.model or _demo_model()
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32)
    ids = tokenizer(args.text.read_text(encoding="utf-8")[args.skip :], add_special_tokens=False).input_ids
    document = tokenizer.decode(ids[: args.tokens])
    questions = args.question or list(_QUESTIONS)
    prompts = [_prompt(tokenizer, document, question) for question in (*questions, "What?", "Who is it?")]
    read = prompts[0][:, : _common(prompts)]

    start = time.perf_counter()
    if args.cache.exists():
        cache = MosaicKVCache.from_pretrained(args.cache, model=model, input_ids=read)
        print(f"Loaded {cache.get_seq_length()} tokens in {time.perf_counter() - start:.2f} s.")
    else:
        cache = MosaicKVCache(config=model.config)
        with torch.no_grad():
            model(read, **{_cache_argument(model): cache})
        print(f"Read {cache.get_seq_length()} tokens in {time.perf_counter() - start:.2f} s.")
        cache.save_pretrained(args.cache, model=model, input_ids=read)
    stats = cache.stats()
    print(f"They take {stats.bytes / 1e6:.1f} MB, as bf16 they would take {stats.bytes_bf16 / 1e6:.1f} MB.\n")

    for question, prompt in zip(questions, prompts):
        start = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            **{_cache_argument(model): copy.deepcopy(cache)},
        )
        answer = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()
        new = prompt.shape[1] - read.shape[1]
        print(f"Q: {question}\nA: {answer}\n({new} tokens read, {time.perf_counter() - start:.2f} s)\n")


def _prompt(tokenizer, document: str, question: str) -> torch.Tensor:
    """`[1, length]` token ids of a chat that shows the document and asks about it."""
    message = {"role": "user", "content": f"{document}\n\nAnswer in one sentence. {question}"}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


def _common(prompts: list[torch.Tensor]) -> int:
    """How many tokens all prompts begin with."""
    shortest = min(prompt.shape[1] for prompt in prompts)
    same = torch.cat([prompt[:, :shortest] for prompt in prompts]).eq(prompts[0][:, :shortest]).all(0)
    return int(same.long().cumprod(0).sum())


def _cache_argument(model) -> str:
    """`past_key_values` in older Transformers, `cache` in newer ones."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _demo_model() -> Path:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    from demo_model import demo_model_path

    return demo_model_path()


if __name__ == "__main__":
    main()
