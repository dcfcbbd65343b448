"""Plugins of the older documentation, and the interface that it has for those of a user."""

from colossal._src.legacy.booster.moe_hybrid_parallel_plugin import MoeHybridParallelPlugin
from colossal._src.legacy.booster.older_plugin import OlderPlugin
from colossal._src.legacy.booster.plugin_bases import DPPluginBase, PipelinePluginBase

__all__ = ["DPPluginBase", "MoeHybridParallelPlugin", "OlderPlugin", "PipelinePluginBase"]
