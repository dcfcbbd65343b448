"""Weights that an engine has loaded are packed for the processor, and multiply as those in rows do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import build_decoder, make_prompts
from torch import nn

from colossal._src.inference.packed_weights import PackedWeight, pack_weights, packs_weights
from colossal.errors import UnsupportedError
from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams
from colossal.testing import run_processes

SIZES: dict[str, Any] = {"max_input_len": 32, "max_output_len": 16}
UNITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""The largest relative error of rounding to a dtype."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def packed_names(model: nn.Module) -> list[str]:
    return [name for name, value in model.named_parameters(remove_duplicate=False) if isinstance(value, PackedWeight)]


def linear_names(model: nn.Module) -> list[str]:
    return [f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "in_features")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama in bfloat16."""
    build_decoder("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def make_layer(in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(in_features + out_features)
    return nn.Linear(in_features, out_features, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 1, 64), (2, 5, 64), (40, 64), (0, 64)])
def test_products_are_those_of_rows(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    layer = make_layer(64, 48, bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    weight = layer.weight.double()
    shift = layer.bias.double() if bias else torch.zeros(48, dtype=torch.double)
    exact = x.double() @ weight.T + shift
    magnitude = x.double().abs() @ weight.abs().T + shift.abs()
    pack_weights(layer)
    assert isinstance(layer.weight, PackedWeight) == packs_weights(dtype)
    found = layer(x)
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    # the result is rounded; terms are added in float32, or with the bias apart, which rounds once more
    bound = 2 * UNITS[dtype] * exact.abs() + UNITS[dtype] * shift.abs() + 66 * 2.0**-24 * magnitude
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", UNITS)
def test_everything_else_sees_rows(dtype: torch.dtype) -> None:
    layer = make_layer(32, 16, bias=True, dtype=dtype)
    rows, x = layer.weight.clone(), torch.randn(4, 32, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    pack_weights(layer)
    assert torch.equal(layer.state_dict()["weight"], rows)
    assert torch.equal(layer.weight.T @ rows, rows.T @ rows)
    assert isinstance(layer.weight, nn.Parameter)
    assert next(layer.parameters()).dtype == dtype
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.skipif(
    not packs_weights(torch.bfloat16), reason="this processor multiplies no bfloat16 by oneDNN, so nothing is packed"
)
def test_packed_weights_are_read_only() -> None:
    layer = make_layer(32, 16, bias=False)
    pack_weights(layer)
    with pytest.raises(UnsupportedError, match="read only"):
        layer.weight.mul_(2)


def test_autocast_sees_rows() -> None:
    layer = make_layer(32, 16, bias=True, dtype=torch.float32)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        pack_weights(layer)
        assert torch.equal(layer(x), expected)


def test_only_what_an_engine_has_loaded_is_packed(folder: Path) -> None:
    config = InferenceConfig(**SIZES)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        loaded = InferenceEngine(folder, None, InferenceConfig(dtype=dtype, **SIZES)).model
        assert packed_names(loaded) == (linear_names(loaded) if packs_weights(dtype) else [])
    assert packed_names(InferenceEngine(build_decoder("llama").to(torch.bfloat16), None, config).model) == []


def test_an_engine_gives_what_its_packed_model_generates(folder: Path) -> None:
    engine = InferenceEngine(folder, None, InferenceConfig(batch_invariant=True, **SIZES))
    found = [list(output.outputs[0].token_ids) for output in engine.generate(make_prompts(), GREEDY)]
    alone = [list(engine.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in make_prompts()]
    assert found == alone
    assert len({token for tokens in found for token in tokens}) >= 8, "outputs repeat themselves and show little"


def generate_on_two_ranks(folder: Path) -> Any:
    engine = InferenceEngine(folder, None, InferenceConfig(tp_size=2, **SIZES))
    outputs = engine.generate(make_prompts(), GREEDY)
    return packed_names(engine.model), linear_names(engine.model), [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_shards_are_packed_too(folder: Path) -> None:
    first, second = run_processes(generate_on_two_ranks, 2, folder)
    assert first == second
    packed, linear, _ = first
    assert packed == (linear if packs_weights(torch.bfloat16) else [])
