"""LongBench on a model, with several caches: `python -m eval.longbench --model ID --data DIR --out DIR`.

Under `accelerate launch -m eval.longbench ...` the samples are shared out over processes and machines.
"""

import argparse
from pathlib import Path

from ..commands import add_arguments, main, positive
from ..samples import Sample, known
from .data import make_samples
from .tasks import BY_LENGTH, TASKS


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m eval.longbench", description=__doc__)
    add_arguments(result, TASKS)
    result.add_argument(
        "--data",
        default="Xnhyacinth/LongBench",
        help="a folder with TASK.jsonl or TASK.parquet files, or a Hub id (default Xnhyacinth/LongBench)",
    )
    result.add_argument(
        "--max-length", type=positive, required=True, help="tokens of a prompt; longer ones lose the middle"
    )
    result.add_argument("--samples", type=positive, help="rows of each task (default: all)")
    result.add_argument("--by-length", action="store_true", help="LongBench-E: scores by range of length")
    return result


def samples(args: argparse.Namespace, tokenizer) -> list[Sample]:
    allowed = [name for name in TASKS if name in BY_LENGTH or not args.by_length]
    names = known("task", args.tasks.split(","), allowed)
    chat = not args.no_chat_template
    return list(make_samples(tokenizer, args.data, names, args.max_length, args.samples, args.by_length, chat))


def settings(args: argparse.Namespace) -> dict:
    return {"data": Path(args.data).name, "max_length": args.max_length, "by_length": args.by_length}


if __name__ == "__main__":
    main(parser(), "longbench", samples, settings)
