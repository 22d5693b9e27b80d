"""Other ways into `generate` than calling it on a plain model."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from conftest import CACHE, tiny_model
from transformers import LlamaForCausalLM, pipeline

from mosaickv_hf import MosaicKVCache, MosaicKVConfig

CONFIG = dataclasses.replace(
    MosaicKVConfig(), min_length=16, min_segment_length=48, recent_window=9, buffer_tokens=16, key_dense_channels=4
)
LOSSLESS = dataclasses.replace(MosaicKVConfig.preset("lossless"), min_length=16, recent_window=9, buffer_tokens=16)
IDS = torch.randint(3, 256, (1, 90), generator=torch.Generator().manual_seed(0))


def tiny():
    return tiny_model("llama-group1", vocab_size=257)


def generate(model, cache, new_tokens=30):
    # A random model may well say that it is done.
    return model.generate(
        IDS, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **{CACHE: cache}
    )


def test_a_compiled_model():
    """The graph breaks around the cache's calls; tokens are those of the plain model."""
    model = tiny()
    expected = generate(model, MosaicKVCache(CONFIG), 12)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    cache = MosaicKVCache(CONFIG)
    assert torch.equal(generate(model, cache, 12), expected)
    assert cache.stats().segments > 0 and cache.stats().dense_materializations == 0


def test_a_pipeline(byte_tokenizer):
    pipe = pipeline("text-generation", model=tiny(), tokenizer=byte_tokenizer)
    text = "It was the best of times, it was the worst of times. " * 3
    cache = MosaicKVCache("lossless")
    given = dict(max_new_tokens=10, do_sample=False, return_full_text=False)
    assert pipe(text, **given, **{CACHE: cache})[0]["generated_text"] == pipe(text, **given)[0]["generated_text"]
    assert cache.get_seq_length() == len(text) + 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    model = tiny().to(dtype)
    for compression in (LOSSLESS, CONFIG):
        cache = MosaicKVCache(compression)
        output = generate(model, cache)
        assert output.shape == (1, 120) and cache.stats().segments > 0
        logits = model(output[:, -1:], **{CACHE: cache}).logits
        assert logits.dtype == dtype and logits.isfinite().all()


def test_layers_on_several_devices(tmp_path):
    """As far as a machine without accelerators goes: one layer's weights are fetched from disk for every call."""
    tiny().save_pretrained(tmp_path / "model")
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    devices |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map=devices, offload_folder=tmp_path / "disk")
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    for compression in (LOSSLESS, CONFIG):
        expected, cache = MosaicKVCache(compression), MosaicKVCache(compression)
        assert torch.equal(generate(model, cache), generate(tiny(), expected))
        assert cache.stats() == expected.stats()


_RANK = """
import os, sys, torch
from conftest import CACHE
from test_doors import LOSSLESS, generate
from transformers import LlamaForCausalLM
from mosaickv_hf import MosaicKVCache

model = LlamaForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
cache = MosaicKVCache(LOSSLESS)
out = generate(model, cache)
heads = [layer.num_key_value_heads for layer in cache.layers]
torch.save((out, heads, cache.stats().bytes), f"{sys.argv[2]}/{os.environ['RANK']}.pt")
"""


@pytest.mark.slow
def test_tensor_parallelism(tmp_path):
    """Each of two processes caches its own KV heads; outputs are those of one process."""
    tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "rank.py").write_text(_RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*launch, "rank.py", "model", "."], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone = MosaicKVCache(LOSSLESS)
    expected = generate(tiny(), alone)
    held = 0
    for rank in "01":
        tokens, heads, size = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(tokens, expected) and heads == [2, 2]
        held += size
    # Each has its own buffers' room and its share of the rest.
    assert held == pytest.approx(alone.stats().bytes, rel=0.02)
