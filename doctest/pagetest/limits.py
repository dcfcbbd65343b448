"""How long things may take: limits end what hangs, and one variable makes all of them longer."""

import os

VARIABLE = "COLOSSAL_TIMEOUT_SCALE"
PAGE_SECONDS = 600.0
"""The limit of a page; the slowest takes less than two minutes on a quiet machine."""


def scaled(seconds: float) -> float:
    """A limit on this machine: the seconds, times what the environment says in `COLOSSAL_TIMEOUT_SCALE`."""
    return seconds * float(os.environ.get(VARIABLE, "1"))
