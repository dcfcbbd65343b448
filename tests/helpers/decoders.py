"""Small causal language models of many families, in float64, whose greedy outputs do not repeat themselves."""

import random
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

VOCABULARY = 256
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
GATED = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
MIXED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GATED),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    "falcon-alibi": ("FalconForCausalLM", SIZES | {"alibi": True}),
    "falcon-rope": ("FalconForCausalLM", SIZES | {"alibi": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES | {"intermediate_size": 64}),
    "qwen3": ("Qwen3ForCausalLM", GATED | {"head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", GATED | {"num_local_experts": 4}),
    "mistral-window": ("MistralForCausalLM", GATED | {"sliding_window": 12}),
}
"""The families of the first bar."""

MORE_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForCausalLM", GATED | MIXED | {"head_dim": 16, "pad_token_id": 0}),
    "deepseek": ("DeepseekV3ForCausalLM", GATED | LATENT),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128, "window_size": 12}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "mpt": ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "phi3": ("Phi3ForCausalLM", GATED | {"pad_token_id": 0}),
}
"""Others: layers of different kinds, latent attention, one key for all heads."""


def build_decoder(name: str) -> Any:
    """Build a model in evaluation mode, its head not tied: a tied one would copy the last token."""
    kind, sizes = (DECODERS | MORE_DECODERS)[name]
    class_of: Any = getattr(transformers, kind)
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = class_of.config_class(vocab_size=VOCABULARY, tie_word_embeddings=False, **ends, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = class_of(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
    if name in {"mixtral", "deepseek"}:
        model.set_experts_implementation("eager")  # others have no float64
    return model


def make_prompts() -> list[list[int]]:
    """Prompts of different lengths, of which three begin alike."""
    numbers = random.Random(0)  # noqa: S311
    lengths = (3, 31, 8, 22, 30)
    prompts = [[numbers.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]
    return [*prompts, [*prompts[1][:21], 7, 8], prompts[4][:17]]


def generate(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What `generate` of transformers gives for each prompt alone."""
    greedy = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    found = [model.generate(torch.tensor([prompt]), generation_config=greedy) for prompt in prompts]
    return [ids[0, len(prompt) :].tolist() for ids, prompt in zip(found, prompts, strict=True)]
