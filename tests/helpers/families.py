"""Tiny models of Hugging Face, of every family, in float64, and batches for them."""

import threading
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from float64 import KeepFloat64
from torch import nn

VOCAB, LENGTH = 131, 12
LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA |= {"vocab_size": VOCAB}
PAIRED = LLAMA | {"num_key_value_heads": 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}
GPT |= {"n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
OPT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": VOCAB}
OPT |= {"word_embed_proj_dim": 64, "dropout": 0, "max_position_embeddings": 32}
FALCON = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
CALM = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB, "dropout_rate": 0}
WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": VOCAB}
WHISPER |= {"num_mel_bins": 16, "max_source_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2}
VIT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
VIT |= {"image_size": 32, "patch_size": 8} | CALM
DEEPSEEK = LLAMA | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
DEEPSEEK |= {
    "num_key_value_heads": 4,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
SEEN = VIT | {"initializer_range": 0.2}
MASKS = {"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 64, "iou_head_hidden_dim": 32}
SAM: dict[str, Any] = {
    "vision_config": SEEN | {"output_channels": 32, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 16},
    "initializer_range": 0.2,
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8},
    "mask_decoder_config": MASKS,
}
BLIP_2: dict[str, Any] = {
    "vision_config": SEEN,
    "qformer_config": {key: VIT[key] for key in LLAMA if key in VIT} | CALM,
    "num_query_tokens": 3,
    "image_token_index": 1,
}
MOE = PAIRED | {"num_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", PAIRED),
    "llama-tied": ("LlamaForCausalLM", PAIRED | {"tie_word_embeddings": True}),
    "llama-sequence": ("LlamaForSequenceClassification", PAIRED | {"pad_token_id": 0}),
    "mistral": ("MistralForCausalLM", PAIRED),
    "mixtral": ("MixtralForCausalLM", PAIRED | {"num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", PAIRED),
    "qwen3": ("Qwen3ForCausalLM", PAIRED | {"head_dim": 16}),
    "cohere": ("CohereForCausalLM", PAIRED),
    "glm": ("GlmForCausalLM", PAIRED | {"head_dim": 16, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt2-two-heads": ("GPT2DoubleHeadsModel", GPT | {"num_labels": 1}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    "opt": ("OPTForCausalLM", OPT),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}),
    "falcon": ("FalconForCausalLM", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "falcon-alibi": ("FalconForCausalLM", FALCON | {"multi_query": False, "alibi": True}),
    "falcon-one-key": ("FalconForCausalLM", FALCON | {"multi_query": True, "bias": True}),
    "falcon-one-key-alibi": ("FalconForCausalLM", FALCON | {"multi_query": True, "alibi": True}),
    "falcon-odd-heads": ("FalconForCausalLM", FALCON | {"num_attention_heads": 71, "hidden_size": 142}),
    "bert": ("BertForMaskedLM", LLAMA | CALM),
    "bert-tokens": ("BertForTokenClassification", LLAMA | CALM),
    "t5": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
    "vit": ("ViTForImageClassification", VIT),
    "deepseek": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek-whole-queries": ("DeepseekV3ForCausalLM", DEEPSEEK | {"q_lora_rank": None}),
    "sam": ("SamModel", SAM),
    "blip-2-opt": ("Blip2ForConditionalGeneration", BLIP_2 | {"text_config": OPT | {"model_type": "opt"}}),
    "blip-2-t5": (
        "Blip2ForConditionalGeneration",
        BLIP_2 | {"text_config": T5 | {"model_type": "t5", "decoder_start_token_id": 0}},
    ),
    "gemma": ("GemmaForCausalLM", PAIRED | {"head_dim": 16}),
    "olmo": ("OlmoForCausalLM", PAIRED),
    "olmoe": ("OlmoeForCausalLM", MOE),
    "starcoder2": ("Starcoder2ForCausalLM", PAIRED | {"residual_dropout": 0, "embedding_dropout": 0}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": MODELS["mixtral"],
    "deepseek": MODELS["deepseek"],
    "qwen3-moe": ("Qwen3MoeForCausalLM", MOE | {"moe_intermediate_size": 32, "head_dim": 16}),
    "olmoe": MODELS["olmoe"],
    "gpt-oss": ("GptOssForCausalLM", PAIRED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
}
"""Those whose experts can be sharded over ranks."""
EAGER_ONLY = ("gpt-oss",)
NOT_CAUSAL = ("bert", "bert-tokens", "t5", "vit", "whisper", "llama-sequence", "sam", "blip-2-t5")

ONE_AT_A_TIME = threading.Lock()
"""Ranks that are threads share one random generator."""


def build(name: str, attention: str = "sdpa", num_layers: int | None = None) -> nn.Module:
    """Build a tiny model in float64."""
    kind, sizes = (MODELS | EXPERTS)[name]
    if num_layers is not None:
        sizes = _with_layers(sizes, num_layers)
    class_of: Any = getattr(transformers, kind)
    chosen = {"attn_implementation": attention} if attention == "eager" else {}  # SAM chooses when it is built
    with ONE_AT_A_TIME, torch.random.fork_rng():
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` is refused in threads, which here take turns
        model = class_of(class_of.config_class(**sizes, **chosen)).double()
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)  # what is zero would hide what is done with it
    if name not in EAGER_ONLY:
        model.set_attn_implementation(attention)
    if name.removesuffix("-whole-queries") in EXPERTS:
        model.set_experts_implementation("eager")  # others have no float64
    return model


def _with_layers(sizes: dict[str, Any], number: int) -> dict[str, Any]:
    """Set the length of every list of layers; a decoder gets one layer less than its encoder."""
    if "decoder_layers" in sizes or "d_kv" in sizes:
        shorter = {"decoder_layers": number - 1} if "decoder_layers" in sizes else {"num_decoder_layers": number - 1}
        return sizes | {key: number for key in ("encoder_layers", "num_layers") if key in sizes} | shorter
    found: dict[str, Any] = {}
    for key, value in sizes.items():
        found[key] = _with_layers(value, number) if isinstance(value, dict) else value
    return found | {key: number for key in ("num_hidden_layers", "n_layer") if key in sizes}


def inputs_of(name: str, num_changed: int = 0) -> dict[str, torch.Tensor]:
    """Make a batch; the last tokens may be other ones."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=draw)
    ids[:, LENGTH - num_changed :] = (ids[:, LENGTH - num_changed :] + 7) % VOCAB
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw).double(), "labels": torch.tensor([0, 1])}
    if name.startswith("blip-2"):
        ids[:, :3] = 1
        decoder = {"decoder_input_ids": ids} if name == "blip-2-t5" else {}
        pixels = torch.randn(2, 3, 32, 32, generator=draw).double()
        return {"pixel_values": pixels, "input_ids": ids, "labels": ids, **decoder}
    if name == "sam":
        points = 32 * torch.rand(2, 1, 3, 2, generator=draw).double()
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw).double(), "input_points": points}
    if name == "whisper":
        return {"input_features": torch.randn(2, 16, 64, generator=draw).double(), "labels": ids}
    if name == "llama-sequence":
        return {"input_ids": ids, "labels": torch.tensor([0, 1])}
    return {"input_ids": ids, "labels": ids % 2 if name == "bert-tokens" else ids}


def results_of(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a model: its loss and its logits, or what stands for them."""
    is_exact = all(parameter.dtype == torch.float64 for parameter in model.parameters())
    with KeepFloat64() if is_exact else nullcontext():
        outputs = model(**inputs)
    if "pred_masks" in outputs:
        return outputs.pred_masks.square().mean() + outputs.iou_scores.sum(), outputs.pred_masks
    return outputs.loss, outputs.logits
