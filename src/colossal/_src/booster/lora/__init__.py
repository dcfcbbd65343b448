"""Low-rank adapters over peft: few trainable parameters next to frozen weights."""

from colossal._src.booster.lora.lora import Lora
from colossal._src.booster.lora.quantization import quantize_with_bitsandbytes

__all__ = ["Lora", "quantize_with_bitsandbytes"]
