"""The base class of plugins that a user writes, with the methods that the older documentation names."""

from colossal._src.legacy.booster import DPPluginBase, MoeHybridParallelPlugin, OlderPlugin, PipelinePluginBase

__all__ = ["DPPluginBase", "MoeHybridParallelPlugin", "OlderPlugin", "PipelinePluginBase"]
