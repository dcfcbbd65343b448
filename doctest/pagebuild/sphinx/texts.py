"""The Sphinx site's own texts, in each language."""

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("texts.json")


@dataclass(frozen=True)
class SiteTexts:
    """The texts of one language."""

    summary: str
    api: str
    aliases: str  # stands above other names of objects
    not_run: str  # stands above code that is not run; holds `{reason}`
    recorded: str  # stands above an output that was recorded; holds `{date}` and `{machine}`
    fold_check: str  # the title of folded code that checks the page
    fold_figure: str  # the title of folded code that draws a figure


def texts_of(language: str) -> SiteTexts:
    """The texts of a language."""
    return SiteTexts(**json.loads(_FILE.read_text(encoding="utf-8"))[language])
