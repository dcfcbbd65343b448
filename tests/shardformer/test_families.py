"""Tensor parallelism against one process: loss, logits, every gradient, and that no token sees those behind it."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.tensor import Layout, relayout
from colossal.testing import run_threads

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
    "gemma": ("GemmaForCausalLM", PAIRED | {"head_dim": 16}),
    "olmo": ("OlmoForCausalLM", PAIRED),
    "starcoder2": ("Starcoder2ForCausalLM", PAIRED | {"residual_dropout": 0, "embedding_dropout": 0}),
}
NOT_CAUSAL = ("bert", "bert-tokens", "t5", "vit", "whisper", "llama-sequence")
# The norms and the rotary positions of some families compute in float32, whatever the type of the model.
RTOL, ATOL = 1e-4, 2e-7


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """Build a tiny model in float64."""
    kind, sizes = MODELS[name]
    class_of: Any = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = class_of(class_of.config_class(**sizes)).double()
    model.set_attn_implementation(attention)
    if name == "mixtral":
        model.set_experts_implementation("eager")  # others have no float64
    return model


def inputs_of(name: str, num_changed: int = 0) -> dict[str, torch.Tensor]:
    """Make a batch; the last tokens may be other ones."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=draw)
    ids[:, LENGTH - num_changed :] = (ids[:, LENGTH - num_changed :] + 7) % VOCAB
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw).double(), "labels": torch.tensor([0, 1])}
    if name == "whisper":
        return {"input_features": torch.randn(2, 16, 64, generator=draw).double(), "labels": ids}
    if name == "llama-sequence":
        return {"input_ids": ids, "labels": torch.tensor([0, 1])}
    return {"input_ids": ids, "labels": ids % 2 if name == "bert-tokens" else ids}


def whole_grads(model: nn.Module, mesh: ParallelMesh) -> dict[str, torch.Tensor | None]:
    """Put gradients together."""
    layouts: dict[int, Layout] = {
        id(module.get_parameter(name)): layout
        for module in model.modules()
        for name, layout in getattr(module, "layouts", {}).items()
    }
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        layout, grad = layouts.get(id(parameter)), parameter.grad
        is_cut = layout is not None and grad is not None
        found[name] = relayout(grad, layout, replace(layout, dims=()), mesh) if is_cut else grad
    return found


def train_sharded(name: str, model: nn.Module, size: int, parallel_output: bool) -> dict[str, Any]:
    """Run a step of a divided copy, and forward once more with another last token."""
    with ParallelMesh(tp=size) as mesh:
        sharded, _ = ShardFormer(ShardConfig(mesh, parallel_output=parallel_output)).optimize(copy.deepcopy(model))
        outputs = sharded(**inputs_of(name))
        outputs.loss.backward()
        with torch.no_grad():
            changed = sharded(**inputs_of(name, num_changed=1)).logits
        numel = sum(parameter.numel() for parameter in sharded.parameters())
        grads = whole_grads(sharded, mesh)
    return {
        "loss": outputs.loss.detach(),
        "logits": outputs.logits.detach(),
        "changed": changed,
        "grads": grads,
        "numel": numel,
    }


def check(name: str, size: int, attention: str, parallel_output: bool) -> None:
    model = build(name, attention)
    alone = copy.deepcopy(model)
    expected = alone(**inputs_of(name))
    expected.loss.backward()
    ranks = run_threads(train_sharded, size, name, model, size, parallel_output)
    for found in ranks:
        torch.testing.assert_close(found["loss"], expected.loss.detach(), rtol=RTOL, atol=ATOL)
        if name not in NOT_CAUSAL:
            before = found["logits"][..., : LENGTH - 1, :]
            torch.testing.assert_close(found["changed"][..., : LENGTH - 1, :], before, rtol=0, atol=1e-12)
        assert found["grads"].keys() == dict(alone.named_parameters()).keys()
        for key, parameter in alone.named_parameters():
            grad = found["grads"][key]
            assert (grad is None) == (parameter.grad is None), key
            if grad is not None:
                assert grad.shape == parameter.shape, key
                torch.testing.assert_close(grad, parameter.grad, rtol=RTOL, atol=ATOL, msg=lambda m, k=key: f"{k}: {m}")
    joined = [found["logits"] for found in ranks]
    whole = joined[0] if joined[0].shape == expected.logits.shape else torch.cat(joined, -1)
    torch.testing.assert_close(whole, expected.logits.detach(), rtol=RTOL, atol=ATOL)
    total = sum(parameter.numel() for parameter in alone.parameters())
    assert all(found["numel"] < 0.8 * total for found in ranks), "hardly anything was divided"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_process(name: str, size: int) -> None:
    check(name, size, "sdpa", parallel_output=True)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_CAUSAL])
def test_eager_attention_and_whole_logits(name: str) -> None:
    check(name, 2, "eager", parallel_output=False)
