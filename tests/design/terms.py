"""The terms of the field: which words names, docstrings, errors, README and the code of pages do not use.

`python tests/design/terms.py` names every use and what to write instead; `--prose` counts those in the text of pages.
The words and the exceptions are in `terms.toml`.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".toml")
CODE = ("src", "doctest")
PAGES = "docs/source/en"
TEXTS = ("README.md",)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_FENCE = re.compile(r"^```python.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Finding(NamedTuple):
    """A term that is not the field's."""

    path: str
    line: int
    found: str
    instead: str


@dataclass(frozen=True)
class Terms:
    """What is not written, by where it would stand."""

    names: dict[str, str]  # word of an identifier -> what to write
    texts: list[tuple[re.Pattern[str], str]]  # in docstrings, comments, messages
    allowed: list[dict[str, str]]  # file, found, reason

    @classmethod
    def load(cls, table: dict[str, Any]) -> "Terms":
        """Read the tables of ``terms.toml``."""
        names = {word: instead for instead, words in table["names"].items() for word in words.split()}
        texts = [
            (re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead)
            for instead, patterns in table["texts"].items()
            for pattern in patterns
        ]
        return cls(names, texts, table.get("allow", []))

    def findings(self, root: Path = ROOT) -> Iterator[Finding]:
        """Every use outside of the allow-list."""
        for finding in self._all_findings(root):
            if not any(_is_allowed(finding, entry) for entry in self.allowed):
                yield finding

    def stale(self, root: Path = ROOT) -> Iterator[str]:
        """Entries of the allow-list that have no reason, or that allow nothing."""
        findings = list(self._all_findings(root))
        for entry in self.allowed:
            if not entry.get("reason", "").strip():
                yield f"{entry} has no reason"
            if not any(_is_allowed(finding, entry) for finding in findings):
                yield f"{entry} allows nothing: remove it"

    def prose(self, root: Path = ROOT) -> Counter[str]:
        """How often the text of each page uses one of the words."""
        counts: Counter[str] = Counter()
        for path in sorted((root / PAGES).rglob("*.md")):
            text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
            counts[path.relative_to(root).as_posix()] = sum(1 for _ in self._in_text(text))
        return counts

    def _all_findings(self, root: Path) -> Iterator[Finding]:
        for folder in CODE:
            for path in sorted((root / folder).rglob("*.py")):
                yield from self._in_code(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"), 0)
        for path in sorted((root / PAGES).rglob("*.md")):
            text = path.read_text(encoding="utf-8")
            for match in _FENCE.finditer(text):
                lines_before = text.count("\n", 0, match.start(1))
                yield from self._in_code(path.relative_to(root).as_posix(), match[1], lines_before)
        for name in TEXTS:
            text = (root / name).read_text(encoding="utf-8")
            yield from (Finding(name, line, found, instead) for line, found, instead in self._in_text(text))

    def _in_code(self, path: str, source: str, lines_before: int) -> Iterator[Finding]:
        found = [*self._in_names(_defined_names(ast.parse(source)))]
        for line, text in _texts_of(source):
            found += [(line + offset - 1, word, instead) for offset, word, instead in self._in_text(text)]
        yield from (Finding(path, lines_before + line, word, instead) for line, word, instead in sorted(found))

    def _in_names(self, names: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
        for line, name in names:
            for word in _WORD.findall(name):
                if word.lower() in self.names:
                    yield line, name, self.names[word.lower()]

    def _in_text(self, text: str) -> Iterator[tuple[int, str, str]]:
        for pattern, instead in self.texts:
            for match in pattern.finditer(text):
                yield text.count("\n", 0, match.start()) + 1, match[0], instead


def _is_allowed(finding: Finding, entry: dict[str, str]) -> bool:
    return re.fullmatch(entry["file"].replace("*", ".*"), finding.path) is not None and finding.found == entry["found"]


def _defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a module gives, with the line; those that it only uses are another's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Comments, and the strings that are sentences: docstrings and messages. Examples in docstrings are code."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            lines = node.value.split("\n")
            yield node.lineno, "\n".join("" if re.match(r"\s*(>>>|\.\.\.) ", line) else line for line in lines)


def main() -> int:
    """Print what is found; 1 if there is something."""
    parser = argparse.ArgumentParser(description="Find words that are not the field's.")
    parser.add_argument("prefix", nargs="*", help="only files whose path begins so")
    parser.add_argument("--prose", action="store_true", help="count the text of the pages too")
    arguments = parser.parse_args()
    terms = Terms.load(tomllib.loads(TABLE.read_text(encoding="utf-8")))
    found = [each for each in terms.findings() if not arguments.prefix or each.path.startswith(tuple(arguments.prefix))]
    problems = [f"{path}:{line}: {word!r}: write {instead}" for path, line, word, instead in found]
    problems += [] if arguments.prefix else terms.stale()
    if arguments.prose:
        counts = {path: count for path, count in terms.prose().most_common() if count}
        sys.stdout.writelines(f"{count:4} {path}\n" for path, count in counts.items())
        sys.stdout.write(f"{sum(counts.values())} in the text of {len(counts)} pages\n")
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    sys.stdout.write(f"{len(problems)} findings\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
