"""The package as it is installed: what is in the wheel, and how it does without what it can do without."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"mosaickv_hf", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mosaickv_hf").rglob("*.py")}
    assert modules <= set(names)
    assert "mosaickv_hf/py.typed" in names
    # Beside the package in the repository, and never `triton_kernels`, which is another package's name.
    kernels = {f"mosaickv_hf/triton_kernels/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}
    assert kernels and kernels <= set(names)


def test_without_numba_and_triton(wheel, tmp_path):
    """It imports, runs in plain torch, says so once, and refuses what needs them."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import sys
sys.modules["numba"] = sys.modules["triton"] = None  # importing them fails
import mosaickv_hf, torch
from mosaickv_hf import MosaicKVCache, MosaicKVConfig
assert mosaickv_hf.__file__.startswith(sys.argv[1])
from transformers import LlamaConfig, LlamaForCausalLM
shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
ids = torch.randint(3, 90, (1, 700))
cache = MosaicKVCache()
model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
assert cache.stats().segments == 2
try:
    model.generate(ids, past_key_values=MosaicKVCache(MosaicKVConfig(backend="numba")), max_new_tokens=5)
except ImportError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert 'backend="numba" needs the numba package' in done.stdout
    assert done.stderr.count("numba is not installed") == 1
