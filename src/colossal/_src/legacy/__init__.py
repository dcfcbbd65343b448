"""The older documented API, as a thin layer over the booster, the mesh and the executor."""

from colossal._src.legacy.notice import superseded

__all__ = ["superseded"]
