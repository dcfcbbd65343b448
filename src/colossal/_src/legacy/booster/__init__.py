"""Plugins of a user, written for the interface of the older documentation."""

from colossal._src.legacy.booster.older_plugin import OlderPlugin

__all__ = ["OlderPlugin"]
