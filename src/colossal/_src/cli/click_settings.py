"""How options of a command line may be spelled."""

from typing import Any

SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("-", "_"),
}
"""Settings of every command: long options with dashes or with underscores."""
