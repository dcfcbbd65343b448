"""The table of older paths: the file ``older_paths.ini``, which is read when a program asks for one of them."""

from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path


def _read_table(file: Path) -> Mapping[str, Mapping[str, str]]:
    table = ConfigParser(delimiters=(":",), interpolation=None)
    table.optionxform = str  # type: ignore[assignment,method-assign] (documented use; the default ignores case)
    table.read_string(file.read_text(encoding="utf-8"))
    return {module: dict(table[module]) for module in table.sections()}


PATHS = _read_table(Path(__file__).with_name("older_paths.ini"))
"""The older module, then the module of today and its names."""
