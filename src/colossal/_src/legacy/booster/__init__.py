"""Plugins of the older documentation, and the interface that it has for those of a user."""

from colossal._src.legacy.booster.moe_hybrid_parallel_plugin import MoeHybridParallelPlugin
from colossal._src.legacy.booster.older_plugin import DataParallelPluginBase, OlderPlugin

__all__ = ["DataParallelPluginBase", "MoeHybridParallelPlugin", "OlderPlugin"]
