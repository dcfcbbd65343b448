"""Frozen weights in 8 or 4 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, final

import torch
from torch import nn

from colossal._src.booster.lora import quantize_with_bitsandbytes
from colossal._src.legacy.notice import superseded
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError, UnsupportedError

_M = TypeVar("_M", bound=nn.Module)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@final
@dataclass
class BnbQuantizationConfig:
    """How bitsandbytes quantizes frozen weights: takes the place of a `transformers.BitsAndBytesConfig`.

    Args:
        load_in_8bit: Whether to quantize to 8 bits.
        llm_int8_threshold: From which size elements are outliers, which are multiplied in half precision.
        load_in_4bit: Whether to quantize to 4 bits.
        bnb_4bit_quant_type: The type of 4 bits.
        bnb_4bit_use_double_quant: Whether to quantize the scales too.
        bnb_4bit_compute_dtype: What 4-bit weights are multiplied in; a type, or its name.
        torch_dtype: The type of what is not quantized; None for that which it has, which is the only choice.
        skip_modules: Names of layers that stay as they are; by default the output embeddings.
        keep_in_fp32_modules: Names of layers that stay in float32; none, which is the only choice.

    Raises:
        ConfigError: Not exactly one of both sizes is chosen, or a type is none.
        UnsupportedError: `torch_dtype` or `keep_in_fp32_modules` is given.

    Example:
        >>> from colossal.legacy.quantization import BnbQuantizationConfig
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").bnb_4bit_compute_dtype
        torch.bfloat16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: torch.dtype | str = "fp16"
    torch_dtype: torch.dtype | None = None
    skip_modules: Sequence[str] | None = None
    keep_in_fp32_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigError(
                "Weights are quantized to 8 or to 4 bits. Found "
                f"load_in_8bit={self.load_in_8bit} and load_in_4bit={self.load_in_4bit}. Set exactly one of them."
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigError(
                f"The type of 4 bits is 'fp4' or 'nf4'. Found {self.bnb_4bit_quant_type!r}. Pass one of them."
            )
        if self.torch_dtype is not None or self.keep_in_fp32_modules:
            raise UnsupportedError(
                "What is not quantized keeps its type. Found "
                f"torch_dtype={self.torch_dtype} and keep_in_fp32_modules={self.keep_in_fp32_modules}. Leave both out, "
                "and give the model the types before: model.to(torch.bfloat16)."
            )
        dtype = self.bnb_4bit_compute_dtype
        if not isinstance(dtype, torch.dtype):
            if dtype not in _DTYPES:
                raise ConfigError(
                    f"bnb_4bit_compute_dtype is a torch.dtype, or one of {', '.join(_DTYPES)}. Found {dtype!r}. Pass "
                    "one of them."
                )
            self.bnb_4bit_compute_dtype = _DTYPES[dtype]


def quantize_model(model: _M, bnb_quantization_config: BnbQuantizationConfig) -> _M:
    """Quantize the linear layers of a model on a GPU by bitsandbytes, in place, and move it there.

    Args:
        model: The model.
        bnb_quantization_config: How.

    Returns:
        `model` itself.

    Raises:
        UnsupportedError: The device of this process is no GPU, or bitsandbytes is not installed.
        ConfigError: The model has no linear layer that can be quantized.

    Example:
        >>> import torch
        >>> from colossal.legacy.quantization import BnbQuantizationConfig, quantize_model
        >>> if torch.cuda.is_available():
        ...     quantize_model(torch.nn.Linear(16, 16), BnbQuantizationConfig(load_in_8bit=True))
        >>> BnbQuantizationConfig(load_in_8bit=True).load_in_4bit
        False
    """
    superseded("colossal.quantization.quantize_model", "Booster.enable_lora(model, ..., quantize=True)")
    quantize_with_bitsandbytes(model, get_accelerator().get_current_device(), bnb_quantization_config)
    return model
