"""Small random models of the kinds that people run, always the same ones."""

from collections.abc import Callable

import torch
from conftest import SHAPE, tiny_model
from transformers import (
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_WINDOWS, _STATES = "Gemma3 (sliding windows)", "Qwen3-Next (linear attention)"
_GROUPED = SHAPE | dict(num_attention_heads=4, num_key_value_heads=2)


def _gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    config = dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=32, layer_types=layers)
    return Gemma3ForCausalLM(Gemma3TextConfig(**_GROUPED, **config))


def _moe() -> PreTrainedModel:
    config = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_GROUPED, **config))


def _hybrid() -> PreTrainedModel:
    layers = ["linear_attention", "full_attention"]
    linear = dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2)
    config = dict(head_dim=16, num_experts=0, layer_types=layers, mlp_only_layers=[0, 1], **linear)
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_GROUPED, **config))


def _vision() -> PreTrainedModel:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = LlamaConfig(**_GROUPED)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=255, image_seq_length=4)
    )


def _peft() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(tiny_model("llama-group1"), config)


ZOO: dict[str, Callable[[], torch.nn.Module]] = {
    "Llama": lambda: tiny_model("llama-group1"),
    "Qwen2": lambda: tiny_model("qwen2-group3"),
    "Qwen3": lambda: tiny_model("qwen3-group4"),
    "Mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=None)),
    _WINDOWS: _gemma3,
    "Qwen3-MoE": _moe,
    _STATES: _hybrid,
    "Llava (text)": _vision,
    "PEFT (LoRA on Llama)": _peft,
}

REFUSED = {
    *((_WINDOWS, feature) for feature in ("crop", "crop of packed tokens")),
    *((_STATES, feature) for feature in ("crop", "crop of packed tokens", "prompt lookup", "assisted decoding")),
    *((_STATES, feature) for feature in ("batch_select_indices", "batch_repeat_interleave")),
}
"""Models with what `DynamicCache` cannot do for them: their states cannot be rolled back, or picked."""


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = ZOO[name]().eval()
    # That of padding is zero otherwise, and with it all of a query's logits.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.2)
    return model
