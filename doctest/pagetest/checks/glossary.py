"""The glossary: the accepted Chinese translations of the terms of the field, and the rejected ones."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagetest.finding import Finding
from pagetest.model.page import LocatedText, Page

FILE = "glossary.json"

_ACCEPTED, _REJECTED = "zh", "not"
_FORM = '{"term": {"zh": ["accepted", ...], "not": ["rejected", ...]}, ...}'
_ASCII = re.compile(r"[ -~]")

# [Note: word boundaries]
# Chinese text has no spaces between terms, so a rejected word may be inside an accepted one. At each position the
# longest word that the glossary knows is taken, and it is a fault only if that one is rejected. A word of Latin letters
# has boundaries, and is only found between them.


@dataclass(frozen=True)
class Glossary:
    """The terms of a glossary file."""

    path: Path  # the file, which need not exist

    @cached_property
    def terms(self) -> Mapping[str, Mapping[str, list[str]]]:
        """For each English term the accepted and the rejected translations; none if the file is not valid."""
        content = self._content
        return content if isinstance(content, dict) and all(map(_is_term, content.values())) else {}

    def faults(self) -> Iterator[Finding]:
        """What is wrong with the file itself."""
        if isinstance(self._content, json.JSONDecodeError):
            yield Finding(self.path, self._content.lineno, f"this is no JSON ({self._content.msg}): correct it")
        elif not self.terms and self._content != {}:
            yield Finding(self.path, 1, f"this is not of the form {_FORM}, with an accepted word at least: correct it")
        for message, term in self._term_faults():
            yield Finding(self.path, self._line_of(term), message)

    def misused_words(self, page: Page) -> Iterator[Finding]:
        """The rejected translations in the prose of a page."""
        if not self.terms:
            return
        for paragraph in page.prose:
            text, lines = _joined(paragraph)
            for match in self._words.finditer(text):
                if match.group() in self._rejected:
                    term, accepted = self._rejected[match.group()]
                    message = f"`{match.group()}` is not the word for {term} here: write `{'` or `'.join(accepted)}`"
                    yield Finding(page.path, lines[match.start()], message)

    @cached_property
    def _content(self) -> Any:
        if not self.path.is_file():
            return {}
        try:
            return json.loads(self.path.read_bytes(), object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            return error

    @cached_property
    def _rejected(self) -> Mapping[str, tuple[str, list[str]]]:
        return {
            word: (term, words[_ACCEPTED]) for term, words in self.terms.items() for word in words.get(_REJECTED, [])
        }

    @cached_property
    def _words(self) -> re.Pattern[str]:
        words = {word for term in self.terms.values() for part in term.values() for word in part}
        return re.compile("|".join(map(_pattern, sorted(words, key=lambda word: (-len(word), word)))))

    def _term_faults(self) -> Iterator[tuple[str, str]]:
        for before, term in pairwise(self.terms):
            if before.lower() >= term.lower():
                yield f"`{term}` comes after `{before}`: sort the terms alphabetically", term
        accepted = {word: term for term, words in self.terms.items() for word in words[_ACCEPTED]}
        seen: dict[str, str] = {}
        for term, words in self.terms.items():
            for word in words.get(_REJECTED, []):
                if word in accepted:
                    yield f"`{word}` is rejected here and accepted for {accepted[word]}: decide", term
                if word in seen:
                    yield f"`{word}` is rejected for {seen[word]} already: name it once", term
                seen[word] = term

    def _line_of(self, term: str) -> int:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        return next((number for number, line in enumerate(lines, 1) if json.dumps(term, ensure_ascii=False) in line), 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ; a key that comes twice gives a value that is no term."""
    found = dict(pairs)
    return found if len(found) == len(pairs) else dict.fromkeys(found)


def _is_term(words: object) -> bool:
    if not isinstance(words, dict) or not set(words) <= {_ACCEPTED, _REJECTED} or not words.get(_ACCEPTED):
        return False
    return all(
        isinstance(part, list) and len(set(part)) == len(part) and all(isinstance(word, str) and word for word in part)
        for part in words.values()
    )


def _pattern(word: str) -> str:
    before = r"(?<![A-Za-z0-9_-])" if _ASCII.match(word[0]) else ""
    after = r"(?![A-Za-z0-9_-])" if _ASCII.match(word[-1]) else ""
    return f"{before}{re.escape(word)}{after}"


def _joined(paragraph: tuple[LocatedText, ...]) -> tuple[str, list[int]]:
    """The paragraph in one line, and the line of each of its characters; Chinese lines are joined without a blank."""
    text, lines = "", []
    for note in paragraph:
        between = " " if text and note.text and (_ASCII.match(text[-1]) or _ASCII.match(note.text[0])) else ""
        text += between + note.text
        lines += [note.line] * len(between + note.text)
    return text, lines
