"""Frozen weights in 8 or 4 bits, by bitsandbytes."""

import importlib
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from colossal.errors import ConfigError, UnsupportedError


@final
@dataclass(frozen=True)
class _QuantizationOptions:
    """What the documented configurations of transformers and of accelerate say."""

    bits: int  # 4 or 8
    keywords: dict[str, Any]  # for the layer of bitsandbytes
    skipped: tuple[str, ...] | None  # names of layers that stay as they are; None to find them out

    @classmethod
    def of(cls, config: Any) -> "_QuantizationOptions":
        if config is None:
            keywords = {"compute_dtype": torch.bfloat16, "compress_statistics": True, "quant_type": "nf4"}
            return cls(4, keywords, None)
        four, eight = getattr(config, "load_in_4bit", None), getattr(config, "load_in_8bit", None)
        if bool(four) == bool(eight):
            raise ConfigError(
                "bnb_quantization_config is a transformers.BitsAndBytesConfig with load_in_4bit=True or "
                f"load_in_8bit=True. Found {config!r}. Set exactly one of them."
            )
        skipped = getattr(config, "llm_int8_skip_modules", None) or getattr(config, "skip_modules", None)
        names = None if skipped is None else tuple(skipped)
        if eight:
            return cls(8, {"has_fp16_weights": False, "threshold": config.llm_int8_threshold}, names)
        keywords = {
            "compute_dtype": config.bnb_4bit_compute_dtype,
            "compress_statistics": config.bnb_4bit_use_double_quant,
            "quant_type": config.bnb_4bit_quant_type,
        }
        return cls(4, keywords, names)


def quantize_with_bitsandbytes(model: nn.Module, device: torch.device, config: Any) -> None:
    """Replace the linear layers of a model by quantized ones, in place, and move it to a GPU.

    By default they are NF4 with double quantization and products in bfloat16. The output embeddings stay as they are,
    and so do the layers that the configuration skips.

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, https://arxiv.org/abs/2305.14314.
    """
    recipe = _QuantizationOptions.of(config)
    if device.type != "cuda":
        raise UnsupportedError(
            f"quantize=True stores weights by bitsandbytes on a GPU. Found the device {device.type!r}. "
            "Pass quantize=False, or bfloat16 weights to halve their memory."
        )
    layers = _require_bitsandbytes()
    names = _linears_to_quantize(model, recipe.skipped)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _quantize_linear(model.get_submodule(name), layers, recipe))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = recipe.bits == 4, recipe.bits == 8  # type: ignore[assignment]  # noqa: PLR2004  (peft reads these)
    model.to(device)


def _require_bitsandbytes() -> Any:
    try:
        return importlib.import_module("bitsandbytes").nn
    except ImportError as error:
        raise UnsupportedError(
            "quantize=True needs the package bitsandbytes. Found that it is not installed. "
            "Run: pip install bitsandbytes, or pass quantize=False"
        ) from error


def _linears_to_quantize(model: nn.Module, skipped: tuple[str, ...] | None) -> list[str]:
    if skipped is None:
        find: Any = getattr(model, "get_output_embeddings", lambda: None)
        output = find()
        skipped = tuple(name for name, module in model.named_modules() if output is not None and module is output)
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(name == skip or name.endswith(f".{skip}") for skip in skipped)
    ]
    if not names:
        raise ConfigError(
            f"quantize=True quantizes the torch.nn.Linear layers of a model. Found none in {type(model).__name__} "
            f"other than the skipped {list(skipped)}. Pass quantize=False."
        )
    return names


def _quantize_linear(linear: nn.Module, layers: Any, recipe: _QuantizationOptions) -> nn.Module:
    """Return the layer that holds the weights of a linear one; it quantizes them when it is moved to the GPU."""
    weight: Any = linear.weight
    bias: Any = linear.bias
    shape = (weight.shape[1], weight.shape[0])
    if recipe.bits == 8:  # noqa: PLR2004
        layer = layers.Linear8bitLt(*shape, bias=bias is not None, **recipe.keywords)
        layer.weight = layers.Int8Params(weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        layer = layers.Linear4bit(*shape, bias=bias is not None, **recipe.keywords)
        kept = {key: recipe.keywords[key] for key in ("compress_statistics", "quant_type")}
        layer.weight = layers.Params4bit(weight.data, requires_grad=False, **kept)
    if bias is not None:
        layer.bias = bias
    return layer
