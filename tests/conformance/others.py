"""Models whose attention is not, or not only, the packed one: what they do with a cache is right all the same."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from conftest import SHAPE
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

_GROUPED = SHAPE | dict(num_attention_heads=4, num_key_value_heads=2)
_FALCON = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, eos_token_id=None)
_ENCODER_DECODER = dict(vocab_size=256, d_model=64, pad_token_id=0, decoder_start_token_id=0, eos_token_id=None)


class Other(NamedTuple):
    """A kind of model.

    Attributes:
        make: a small random one.
        packed: whether it attends to packed data; otherwise K and V are expanded at every step.
        why: what is peculiar to it.
    """

    make: Callable[[], torch.nn.Module]
    packed: bool
    why: str


def _deepseek() -> torch.nn.Module:
    heads = dict(kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=24)
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32)
    shape = SHAPE | dict(num_attention_heads=4, num_key_value_heads=4)
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **heads, **experts, first_k_dense_replace=1))


def _gpt_oss() -> torch.nn.Module:
    config = dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
    return GptOssForCausalLM(GptOssConfig(**_GROUPED, **config))


def _t5() -> torch.nn.Module:
    return T5ForConditionalGeneration(T5Config(**_ENCODER_DECODER, d_kv=16, d_ff=96, num_layers=2, num_heads=4))


def _bart() -> torch.nn.Module:
    shape = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in _BART_SHAPE.items()}
    return BartForConditionalGeneration(BartConfig(**_ENCODER_DECODER, **shape, forced_eos_token_id=None))


_BART_SHAPE = dict(layers=2, attention_heads=4, ffn_dim=96)

OTHERS: dict[str, Other] = {
    "Falcon": Other(lambda: FalconForCausalLM(FalconConfig(**_FALCON, alibi=True)), True, "ALiBi: float masks"),
    "Bloom": Other(
        lambda: BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4, eos_token_id=None)),
        False,
        "multiplies by K itself",
    ),
    "Gemma2": Other(
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**_GROUPED, head_dim=16, sliding_window=32, attn_implementation="eager")
        ),
        False,
        "capped logits, which SDPA does not know; sliding windows",
    ),
    "GPT-OSS": Other(_gpt_oss, False, "attention sinks, which SDPA does not know"),
    "DeepSeek-V3": Other(_deepseek, False, "MLA: caches what K and V are made from"),
    "T5": Other(_t5, True, "encoder and decoder, position bias"),
    "BART": Other(_bart, True, "encoder and decoder"),
}


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = OTHERS[name].make().eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    return model
