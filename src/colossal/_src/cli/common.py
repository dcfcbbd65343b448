"""What all commands have in common: the version, and how their options may be spelled."""

import sys
from typing import Any

SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("-", "_"),
}
"""Settings of every command: long options with dashes or with underscores."""


VERSION: str = sys.modules["colossal"].__version__
"""Read from the package around this one, which Python has imported first: no module imports the front door."""
