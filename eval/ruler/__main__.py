"""RULER on a model, with several caches: `python -m eval.ruler --model ID --lengths 4096 --out DIR`.

Under `accelerate launch -m eval.ruler ...` the samples are shared out over processes and machines.
"""

import argparse
from pathlib import Path

from ..commands import add_arguments, main, positive
from ..samples import Sample, known
from .rows import row_samples
from .tasks import NAMES, Sources, make_samples


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m eval.ruler", description=__doc__)
    add_arguments(result, NAMES)
    result.add_argument(
        "--lengths", type=lengths, default="4096", help="tokens of prompt and answer, by comma (default 4096)"
    )
    result.add_argument("--samples", type=positive, default=10, help="of each task and length (default 10)")
    result.add_argument("--seed", type=int, default=1000, help="first seed (default 1000; develop on those below)")
    result.add_argument("--haystack", help="essay text: a file or Hub id (default: a short text of our own, repeated)")
    result.add_argument("--squad", help="questions of qa_1: SQuAD's JSON file, or a Hub id")
    result.add_argument("--hotpotqa", help="questions of qa_2: HotpotQA's JSON file, or a Hub id")
    result.add_argument("--rows", help="ready-made rows instead: a jsonl or parquet file, or a Hub id")
    result.add_argument("--rows-config", help="config of the Hub id of --rows, such as 4096")
    return result


def lengths(text: str) -> list[int]:
    """Positive numbers, by comma."""
    return [positive(part) for part in text.split(",")]


def samples(args: argparse.Namespace, tokenizer) -> list[Sample]:
    names = known("task", args.tasks.split(","), NAMES)
    chat = not args.no_chat_template
    if args.rows:
        return list(row_samples(tokenizer, args.rows, args.rows_config, names, args.samples, chat))
    sources = Sources(args.haystack, args.squad, args.hotpotqa)
    return list(make_samples(tokenizer, names, args.lengths, args.samples, args.seed, sources, chat))


def settings(args: argparse.Namespace) -> dict:
    if args.rows:
        return {"rows": args.rows, "rows_config": args.rows_config}
    sources = {name: getattr(args, name) for name in ("haystack", "squad", "hotpotqa")}
    return {"seed": args.seed, "sources": {name: source and Path(source).name for name, source in sources.items()}}


if __name__ == "__main__":
    main(parser(), "ruler", samples, settings)
