"""The texts that notebooks add to a page, in both languages; they are in `texts.json`."""

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("texts.json")


def format_text(key: str, language: str, **values: str) -> str:
    """A sentence with its values filled in."""
    text = _texts()["phrases"][key][language]
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def alert_title(kind: str, language: str) -> str:
    """The title of an alert."""
    return _texts()["alerts"][kind][language]


@cache
def _texts() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))
