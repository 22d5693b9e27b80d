"""Models that the suite shares."""

import copy
import inspect
import os

# Triton's kernels run in its interpreter; it looks when it is imported, which others do.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from demo_model import demo_model_path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# `past_key_values` in older Transformers, `cache` in newer ones.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

SHAPE = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    max_position_embeddings=4096,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TINY = {
    "llama-group1": (LlamaForCausalLM, LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=4)),
    "qwen2-group3": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE | dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)),
    ),
    "qwen3-group4": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=1, head_dim=32),
    ),
}


def tiny_model(name, **changes):
    """The random model `name` of `TINY`, always the same one, with other values of some of its config's fields."""
    make, config = TINY[name]
    config = copy.deepcopy(config)
    for field, value in changes.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    return make(config).eval()


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A chat tokenizer whose tokens are bytes, 0 to 255 (in another order), and 256 for padding and the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}answer:{% endif %}"
    )
    return tokenizer


def uneven_states(heads, length, head_dim, dtype=torch.float32):
    """`[heads, length, head_dim]` with an uneven spectrum and a mean, as keys of models have."""
    basis = torch.randn(heads, head_dim, head_dim) / head_dim**0.5
    spectrum = torch.logspace(0.3, -0.7, head_dim)
    return ((torch.randn(heads, length, head_dim) * spectrum) @ basis + 2 * basis[:, :1]).to(dtype)


@pytest.fixture
def poisoned():
    """Memory that torch does not initialize holds NaN, so that what a kernel fails to write is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", params=[*TINY, pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request):
    """A small random model of each family, and the real SmolLM2-135M-Instruct; in float32 with SDPA attention."""
    if request.param == "smollm2":
        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    else:
        model = tiny_model(request.param)
    model.generation_config.eos_token_id = -1  # never: answers have a fixed length
    return model.eval()
