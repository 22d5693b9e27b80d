"""Writes a repository for the Hugging Face Hub with which any model generates with a MosaicKVCache:

    python scripts/export_custom_generate.py DIR
    model.generate(**inputs, custom_generate="DIR or repository", trust_remote_code=True)

The folder can be uploaded as it is (`hf upload user/name DIR`).
"""

import argparse
import shutil
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

_RECIPE = Path(__file__).resolve().parent / "custom_generate" / "generate.py"
_TEXT = """
# Generation with a compressed KV cache

Any Llama, Qwen2, Qwen3 or Mistral style model generates with a `MosaicKVCache`, which stores K and V about four times
smaller than bf16 and attends only to the blocks of tokens that the query selects:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
inputs = tokenizer("A long document ...", return_tensors="pt")
output = model.generate(**inputs, custom_generate="{name}", trust_remote_code=True, max_new_tokens=100)
```

`compression=` takes the name of a preset (`"default"`, `"paper"`, `"lossless"`) or a dict of `MosaicKVConfig`'s fields.
All other arguments are those of `generate`. It needs the package `mosaickv-hf`, whose documentation tells what is
lost and what is gained. Method: [MosaicKV](https://arxiv.org/abs/2607.00760).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--name", help="the repository's name, for the card (default: the folder's)")
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty")
    export(args.folder, args.name or args.folder.name)


def export(folder: Path, name: str) -> None:
    """Writes the repository into a folder."""
    target = folder / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(_RECIPE, target / "generate.py")
    (target / "requirements.txt").write_text("mosaickv-hf\n", encoding="utf-8")
    data = ModelCardData(library_name="transformers", license="apache-2.0", tags=["custom_generate", "kv-cache"])
    ModelCard(f"---\n{data.to_yaml()}\n---\n{_TEXT.format(name=name)}").save(folder / "README.md")


if __name__ == "__main__":
    main()
