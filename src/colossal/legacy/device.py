"""Grids of devices, and what it costs to communicate along their axes."""

from colossal._src.legacy.mesh import AlphaBetaProfiler, DeviceMesh

__all__ = ["AlphaBetaProfiler", "DeviceMesh"]
