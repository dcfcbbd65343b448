"""Quantization by its older names: 8-bit products, and settings of bitsandbytes; names without a counterpart."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError, UnsupportedError

quantization: Any = importlib.import_module("colossal.quantization")
fp8: Any = importlib.import_module("colossal.quantization.fp8")


def test_products_in_8_bits_follow_those_of_float32() -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((4, 3, 32), (48, 32), (48,)))
    exact = nn.functional.linear(x, weight, bias)
    (exact**2).sum().backward()
    expected = [each.grad.clone() for each in (x, weight, bias)]
    for each in (x, weight, bias):
        each.grad = None
    found = fp8.linear_fp8(x, weight, bias)
    (found**2).sum().backward()
    assert 0 < (found - exact).norm() / exact.norm() < 0.1
    for each, gradient in zip((x, weight, bias), expected, strict=True):
        assert (each.grad - gradient).norm() / gradient.norm() < 0.15
    assert torch.equal(fp8.linear_fp8(x, weight), found - bias) or torch.allclose(
        fp8.linear_fp8(x, weight) + bias, found
    )


def test_settings_of_bitsandbytes() -> None:
    config = quantization.BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16", skip_modules=["head"])
    assert config.bnb_4bit_compute_dtype is torch.bfloat16
    assert (config.bnb_4bit_quant_type, config.skip_modules) == ("fp4", ["head"])
    for wrong, text in (
        ({}, "exactly one"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "exactly one"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "'fp4' or 'nf4'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"}, "one of fp32, fp16, bf16"),
    ):
        with pytest.raises(ConfigError, match=text):
            quantization.BnbQuantizationConfig(**wrong)
    for wrong in ({"torch_dtype": torch.float16}, {"keep_in_fp32_modules": ["norm"]}):
        with pytest.raises(UnsupportedError, match="keeps its type"):
            quantization.BnbQuantizationConfig(load_in_8bit=True, **wrong)


@pytest.mark.skipif(not get_accelerator().is_cpu, reason="says what a device without bitsandbytes does")
def test_quantize_model_needs_a_gpu() -> None:
    config = quantization.BnbQuantizationConfig(load_in_8bit=True)
    with pytest.raises(UnsupportedError, match="on a GPU. Found the device 'cpu'"):
        quantization.quantize_model(nn.Sequential(nn.Linear(16, 16)), config)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("colossal.kernel.kernel_loader", "MoeLoader", "torch.compile"),
        ("colossal.kernel.kernel_loader", "KernelLoader", "torch.library"),
        ("colossal.nn.optimizer", "NVMeOptimizer", "nvme_offload_fraction"),
    ],
)
def test_a_name_without_counterpart_says_what_to_use(module, name, instead) -> None:
    with pytest.raises(ImportError, match=instead):
        exec(f"from {module} import {name}")  # noqa: S102 (the statement of a program)
