"""Modules of a model that an engine has loaded compute in fewer passes, and what they computed before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import DECODERS, MORE_DECODERS, build_decoder, generate, make_prompts
from engines import SIZES, greedy, tokens_of
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from colossal._src.inference.fused_modules import _rotate, fuse_modules
from colossal._src.kernel import has_fused_modules
from colossal.inference import InferenceConfig, InferenceEngine
from colossal.testing import run_processes

pytestmark = pytest.mark.skipif(not has_fused_modules(), reason="no compiler")

FUSED = {
    "llama": {"RMSNorm", "MLP", "Attention"},
    "mistral-window": {"RMSNorm", "MLP", "Attention"},
    "mixtral": {"RMSNorm", "Attention"},
    "qwen3": {"RMSNorm", "MLP", "Attention"},
    "falcon-alibi": {"Attention"},
    "falcon-rope": {"Attention"},
    "gemma3": {"MLP", "Attention"},
    "deepseek": {"RMSNorm", "MLP", "Attention"},
    "phi3": {"RMSNorm"},
}
"""Kinds of modules that are recognized; of other families none is."""


def fused_kinds(model: nn.Module) -> set[str]:
    kinds = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    return {kind for kind in ("RMSNorm", "MLP", "Attention") if any(name.endswith(kind) for name in kinds)}


@pytest.mark.parametrize("name", [*DECODERS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_DECODERS)])
def test_each_family_generates_what_it_did(name: str, tmp_path: Path) -> None:
    model = build_decoder(name).float()
    model.save_pretrained(tmp_path)
    engine = InferenceEngine(tmp_path, None, InferenceConfig(**SIZES))
    assert fused_kinds(engine.model) == FUSED.get(name, set())
    assert tokens_of(engine.generate(make_prompts(), greedy(8))) == generate(model, make_prompts(), 8)


def test_a_model_of_the_user_stays_as_it_is() -> None:
    model = build_decoder("llama").float()
    InferenceEngine(model, None, InferenceConfig(**SIZES)).generate(make_prompts(), greedy(2))
    assert fused_kinds(model) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_model(dtype: torch.dtype) -> None:
    model, ids = build_decoder("llama").requires_grad_(False), torch.tensor([make_prompts()[1]])
    exact, own = model(ids).logits, model.to(dtype)(ids).logits.double()
    fuse_modules(model)
    error, own_error = ((each - exact).norm() for each in (model(ids).logits.double(), own))
    assert error <= 1.5 * own_error  # as many roundings, or fewer


def test_gradients_are_those_of_the_model() -> None:
    model, ids = build_decoder("qwen3").float(), torch.tensor([make_prompts()[1]])

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    fuse_modules(model)
    found = gradients()
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_what_own_code_does_not_read_is_left_to_the_module() -> None:
    norm, x = LlamaRMSNorm(16).requires_grad_(False), torch.randn(3, 16)
    inputs = (x.double(), x.bfloat16(), x[:0])
    expected = [norm(each) for each in inputs]
    fuse_modules(norm)
    assert all(torch.equal(norm(each), own) for each, own in zip(inputs, expected, strict=True))
    assert norm.to("meta")(x.to("meta")).shape == (3, 16)


def test_positions_in_another_form_are_left_to_the_model() -> None:
    query, key = torch.randn(3, 4, 2, 8), torch.randn(3, 2, 2, 8)
    cos, sin = torch.randn(2, 3, 2, 8).unbind()
    strided = torch.randn(3, 2, 8, 2)[..., 0]
    cases: list[Any] = [
        (query, key, cos[0, 0].expand(1, 1, 8), sin[0, 0].expand(1, 1, 8)),  # of no row
        (query, key, cos, strided),
        (query, key, cos.double(), sin.double()),
        (query.transpose(1, 2), key.transpose(1, 2), cos, sin, 2),
        (query.transpose(2, 3).contiguous().transpose(2, 3), key, cos, sin),
    ]
    for arguments in cases:
        for found, own in zip(_rotate(*arguments), apply_rotary_pos_emb(*arguments), strict=True):
            assert found.dtype == own.dtype
            assert torch.equal(found, own)


def test_another_activation_is_kept() -> None:
    config = build_decoder("gemma3").config
    layer = Gemma3MLP(config).requires_grad_(False)
    x = torch.randn(3, config.hidden_size)
    expected = layer(x)
    fuse_modules(layer)
    assert "forward" in vars(layer)
    assert torch.equal(layer(x), expected)


def test_a_forward_of_the_user_is_kept() -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    replaced, own = LlamaRMSNorm(16), Doubled(16)
    replaced.forward = lambda hidden_states: hidden_states
    fuse_modules(nn.ModuleList([replaced, own]))
    x = torch.randn(3, 16)
    assert replaced(x) is x
    assert torch.equal(own(x), 2 * LlamaRMSNorm(16)(x))


def generate_on_two_ranks(folder: Path, sizes: dict[str, int]) -> Any:
    engine = InferenceEngine(folder, None, InferenceConfig(**sizes, **SIZES))
    return fused_kinds(engine.model), tokens_of(engine.generate(make_prompts(), greedy(8)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "deepseek"])
def test_shards_generate_what_the_model_does(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    build_decoder(name).float().save_pretrained(tmp_path)
    expected = generate(build_decoder(name).float(), make_prompts(), 8)
    assert run_processes(generate_on_two_ranks, 2, tmp_path, sizes) == [(FUSED[name], expected)] * 2
