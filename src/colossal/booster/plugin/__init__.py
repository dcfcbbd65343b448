"""Recipes of parallelism for `Booster`."""

from colossal.booster.plugin.base import Plugin
from colossal.booster.plugin.gemini import GeminiPlugin
from colossal.booster.plugin.low_level_zero import LowLevelZeroPlugin
from colossal.booster.plugin.torch_ddp import TorchDDPPlugin
from colossal.booster.plugin.torch_fsdp import TorchFSDPPlugin

__all__ = ["GeminiPlugin", "LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
