"""The base class of plugins that a user writes, with the methods that the older documentation names."""

from colossal._src.legacy.booster import DataParallelPluginBase, MoeHybridParallelPlugin, OlderPlugin

__all__ = ["DataParallelPluginBase", "MoeHybridParallelPlugin", "OlderPlugin"]
