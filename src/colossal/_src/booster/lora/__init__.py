"""Low-rank adapters over peft: few trainable parameters next to frozen weights."""

from colossal._src.booster.lora.lora import Lora
from colossal._src.booster.lora.quantization import BitsAndBytes, Quantizer

__all__ = ["BitsAndBytes", "Lora", "Quantizer"]
