"""One set of verbs for training under any plugin."""

from colossal._src.booster import (
    Boosted,
    Booster,
    Capabilities,
    Executor,
    Parts,
)

__all__ = ["Boosted", "Booster", "Capabilities", "Executor", "Parts"]
