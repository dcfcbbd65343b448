"""One set of verbs for training under any plugin."""

from colossal._src.booster.booster import Booster
from colossal._src.interface import Boosted, Capabilities, Executor, Parts

__all__ = ["Boosted", "Booster", "Capabilities", "Executor", "Parts"]
