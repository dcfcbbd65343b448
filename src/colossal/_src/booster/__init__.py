"""One set of verbs for training under any plugin."""

from colossal._src.booster.boost_types import Boosted, Capabilities, Executor, Parts
from colossal._src.booster.booster import Booster

__all__ = ["Boosted", "Booster", "Capabilities", "Executor", "Parts"]
