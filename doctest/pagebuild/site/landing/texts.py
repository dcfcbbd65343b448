"""The texts of the landing page's data, in both languages; they are in `texts.json`."""

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("texts.json")


def labels_of(group: str, key: str) -> dict[str, str]:
    """The labels of an entry, by language."""
    return _texts()[group][key]


@cache
def _texts() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))
