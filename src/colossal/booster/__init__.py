"""One set of verbs for training under any plugin."""

from colossal._src.booster import (
    Boosted,
    Booster,
    Capabilities,
    Executor,
    Parts,
)
from colossal.booster import mixed_precision as mixed_precision
from colossal.booster import plugin as plugin

__all__ = ["Boosted", "Booster", "Capabilities", "Executor", "Parts"]
