"""One set of verbs for training under any plugin."""

from colossal.booster.booster import Booster

__all__ = ["Booster"]
