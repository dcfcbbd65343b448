"""How long things may take: limits end what hangs, and one variable makes all of them longer."""

import os

VARIABLE = "COLOSSAL_TIMEOUT_SCALE"


def scaled(seconds: float) -> float:
    """Return a limit on this machine: the seconds, times what the environment says in ``COLOSSAL_TIMEOUT_SCALE``."""
    return seconds * float(os.environ.get(VARIABLE, "1"))
