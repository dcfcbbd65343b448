"""Stamps: which wording of each original section a translation renders, kept in a file beside the translations."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetest.finding import Finding
from pagetest.model.sections import Section
from pagetest.model.tree import Tree
from pagetest.usage import UsageError

FILE = "translations.json"


class TranslationHashesError(UsageError):
    """The file holds something else than stamps; `finding` says where."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass(frozen=True)
class TranslationHashes:
    """A JSON file that maps `page#slug` of the original to the hash of the section that was translated, line by line.

    The slugs tell a reader of a change what was acknowledged; only the hashes count, so that a section may move.

    Attributes:
        path: The file, which need not exist.
    """

    path: Path

    def hashes_of(self, name: str) -> frozenset[str]:
        """The hashes of the sections of a page that are translated.

        Raises:
            StampsError: The file holds something else.
        """
        return frozenset(digest for key, digest in self._read().items() if _page(key) == name)

    def write(self, name: str, sections: Iterable[Section]) -> None:
        """Replaces the stamps of a page; the rest of the file stays.

        Raises:
            StampsError: The file holds something else; it is left as it is.
        """
        kept = {key: digest for key, digest in self._read().items() if _page(key) != name}
        content = kept | {f"{name}#{section.slug}": section.hash for section in sections}
        text = _written(content)
        if not self.path.is_file() or self.path.read_text(encoding="utf-8") != text:
            fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.path)

    def faults(self, tree: Tree) -> Iterator[Finding]:
        """What is wrong with the file itself."""
        try:
            content = self._read()
        except TranslationHashesError as error:
            yield error.finding
            return
        text = self.path.read_text(encoding="utf-8") if content else _written({})
        for name in sorted({_page(key) for key in content} - set(tree.names)):
            line = next(number for number, line in enumerate(text.split("\n"), 1) if f'"{name}#' in line)
            yield Finding(self.path, line, f"there is no page `{name}` any more: remove its stamps")
        if text != _written(content):
            yield Finding(self.path, 1, "the stamps are not sorted, one in a line: any --ack sorts them")

    def _read(self) -> dict[str, str]:
        try:
            content: Any = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except json.JSONDecodeError as error:
            message = f"this is no JSON ({error.msg}): restore it, or remove it and --ack what is translated"
            raise TranslationHashesError(Finding(self.path, error.lineno, message)) from None
        if not isinstance(content, dict) or not all(isinstance(digest, str) for digest in content.values()):
            raise TranslationHashesError(
                Finding(self.path, 1, 'this is not of the form {"page#section": "hash"}: restore it')
            )
        return content


def _written(content: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(content.items())), indent=1, ensure_ascii=False) + "\n"


def _page(key: str) -> str:
    return key.partition("#")[0]
