# pyright: reportAssignmentType=false
"""Models of transformers, each lazily and at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
OPT = {k: v for k, v in SMALL.items() if k != "intermediate_size"} | {"ffn_dim": 64, "word_embed_proj_dim": 32}
FALCON = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
VISION = {k: SMALL[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
WHISPER = {
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "max_source_positions": 8,
    "num_mel_bins": 4,
}
SAM = {
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "output_channels": 16,
        "image_size": 32,
        "patch_size": 8,
        "mlp_dim": 64,
    },
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8},
    "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 16},
}
BLIP2 = {
    "vision_config": {**VISION, "image_size": 16, "patch_size": 8},
    "qformer_config": SMALL,
    "text_config": {"model_type": "opt", **OPT},
    "image_token_index": 98,
}
DEEPSEEK = {
    **SMALL,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
TEXT = {"input_ids": torch.arange(3, 11).reshape(1, 8)}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", SMALL, TEXT),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, TEXT),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT, TEXT),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}, TEXT),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT, TEXT),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
        TEXT,
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, {**TEXT, "decoder_input_ids": TEXT["input_ids"]}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**VISION, "image_size": 8, "patch_size": 4},
        {"pixel_values": torch.ones(1, 3, 8, 8)},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        {"input_features": torch.ones(1, 4, 16), "decoder_input_ids": TEXT["input_ids"]},
    ),
    "sam": ("SamModel", "SamConfig", SAM, None),  # its forward pass takes images of one size only, a large one
    "blip2": (
        "Blip2ForConditionalGeneration",
        "Blip2Config",
        BLIP2,
        {"pixel_values": torch.ones(1, 3, 16, 16), "input_ids": torch.tensor([[98] * 32 + [4, 5]])},
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON, TEXT),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED, TEXT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}, TEXT),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, TEXT),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, TEXT),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED, TEXT),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, TEXT),
    "glm": ("GlmForCausalLM", "GlmConfig", {**GROUPED, "head_dim": 8}, TEXT),
    "swin": ("SwinModel", "SwinConfig", SWIN, {"pixel_values": torch.ones(1, 3, 16, 16)}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if index % 2 == 0 else pytest.mark.slow) for index, each in enumerate(FAMILIES)],
)
def test_a_family_is_built_lazily_as_at_once(family: str, same_modules: Callable[..., Any]) -> None:
    model, config, options, inputs = FAMILIES[family]
    built = getattr(transformers, config)(**options)
    eager, lazy = same_modules(lambda: getattr(transformers, model)(built))
    if inputs is not None:
        with torch.no_grad():
            results = [each.eval()(**inputs)[0] for each in (eager, lazy)]
        assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_another_precision(dtype: torch.dtype, same_modules: Callable[..., Any]) -> None:
    config = transformers.LlamaConfig(**GROUPED)
    _, lazy = same_modules(lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=dtype))
    assert lazy.lm_head.weight.dtype == dtype
