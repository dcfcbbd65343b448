"""What readers type into the search, and the terms of the documentation that are meant by it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagebuild.site.edition import BrokenInputError, Edition, read_json
from pagetest.checks import glossary
from pagetest.checks.glossary import Glossary
from pagetest.finding import Finding
from pagetest.model.tree import LANGUAGES

FILE = "search.json"


def search_synonyms(root: Path, edition: Edition) -> dict[str, list[dict[str, Any]]]:
    """The synonyms of each language: those of docs/search.json, then the terms that the glossary does not accept."""
    path = root / "docs" / FILE
    entries = read_json(path, "correct it") if path.is_file() else []
    if faults := list(_faults(path, entries, edition)):
        raise BrokenInputError(*faults)
    terms = Glossary(root / "docs" / glossary.FILE).terms
    return {
        language: [
            *(entry | {"means": entry["means"][language]} for entry in entries),
            *(_of_term(term, words["zh"], words.get("not", []), language) for term, words in terms.items()),
        ]
        for language in LANGUAGES
    }


def _of_term(term: str, accepted: list[str], rejected: list[str], language: str) -> dict[str, Any]:
    """How a term is called in the language, whatever it is called by the reader."""
    means = term if language == LANGUAGES[0] else accepted[0]
    say = {word.lower() for word in (term, *accepted, *rejected) if len(word) > 1} - {means.lower()}
    return {"say": sorted(say), "means": means}


def _faults(path: Path, entries: list[dict[str, Any]], edition: Edition) -> Iterator[Finding]:
    """The entries that name a page which does not exist, or not what is meant in each language."""
    lines = path.read_text(encoding="utf-8").splitlines() if entries else []
    for entry in entries:
        word = json.dumps(entry["say"][0], ensure_ascii=False)
        line = next((number for number, text in enumerate(lines, 1) if word in text), 1)
        if lost := set(LANGUAGES) - set(entry["means"]):
            yield Finding(
                path, line, f"{word} has no meaning in {', '.join(sorted(lost))}: say which terms it stands for"
            )
        if entry.get("page", edition.tree.names[0]) not in edition.tree.names:
            yield Finding(
                path, line, f"{word} leads to {entry['page']}, which does not exist: name a page of the sidebar"
            )
