"""What the commands of both benchmarks share: arguments, model, the run, the table."""

import argparse
import datetime
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from scripts.record import environment

from .errors import EvalError
from .methods import NAMES, configs
from .report import table
from .runner import run
from .samples import Sample


def add_arguments(parser: argparse.ArgumentParser, tasks: Iterable[str]) -> None:
    """Adds the arguments of both benchmarks; `tasks` are the names that there are."""
    parser.add_argument("--model", required=True, help="a model folder or Hub id")
    parser.add_argument(
        "--methods",
        default="full,default",
        help=f"by comma, of {', '.join(NAMES)}, or .json files of a MosaicKVConfig (default: full,default)",
    )
    parser.add_argument("--tasks", default="all", help=f"by comma, of {', '.join(tasks)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an interrupted one goes on there")
    parser.add_argument(
        "--batch-size", type=positive, default=1, help="prompts decoded together, left-padded (default 1)"
    )
    parser.add_argument("--dtype", default="auto", help="of the model (default: float32 on a CPU, else as saved)")
    parser.add_argument("--no-chat-template", action="store_true", help="prompts as they are, also for chat models")


def positive(text: str) -> int:
    """A number above zero, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number above zero, got {text!r}")
    return int(text)


def main(
    parser: argparse.ArgumentParser,
    benchmark: str,
    make_samples: Callable[[argparse.Namespace, object], list[Sample]],
    settings_of: Callable[[argparse.Namespace], dict],
) -> None:
    """Runs a benchmark's command; errors of data and arguments end it with a message and status 2."""
    args = parser.parse_args()
    # A process that is done may wait for the others as long as it takes.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=datetime.timedelta(days=7))
    try:
        given = configs(args.methods.split(","))
        model = _load(args, state)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        samples = make_samples(args, tokenizer)
        if not samples:
            raise EvalError("no sample is left to answer; look at --tasks and --samples")
        settings = {
            "benchmark": benchmark,
            "model": Path(args.model).name,
            "dtype": str(model.dtype).removeprefix("torch."),
            **settings_of(args),
            "batch_size": args.batch_size,
            "chat_template": not args.no_chat_template,
            "configs": given,
        }
        results = run(
            samples,
            args.methods.split(","),
            model=model,
            tokenizer=tokenizer,
            state=state,
            out=args.out,
            batch_size=args.batch_size,
            settings=settings,
            made=environment() | {"device": _device(state)},
        )
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if results is not None:
        print(table(results))


def _load(args: argparse.Namespace, state: PartialState) -> PreTrainedModel:
    dtype = args.dtype
    if dtype == "auto" and state.device.type == "cpu":
        dtype = "float32"
    try:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, AttributeError) as error:
        raise EvalError(f"cannot load --model {args.model} with --dtype {args.dtype}: {error}") from error
    return model.to(state.device).eval()


def _device(state: PartialState) -> str:
    return torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type
