"""The README's count: how many tutorials have passed, as the committed records say."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagetest.finding import Finding, with_count
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.results.records import Records
from pagetest.results.result import PASS, SAME
from pagetest.run.device import CPU, CUDA

_COUNT = re.compile(r"(<!-- doc-test-count -->)(.*?)(<!-- /doc-test-count -->)", re.DOTALL)


@dataclass(frozen=True)
class ReadmeCount:
    """A sentence between two comments in the README."""

    file: Path  # the README; without the comments, or without the file, nothing is written
    tree: Tree
    records: Records

    def update(self) -> None:
        """Writes the sentence that the records give."""
        if (text := self._text()) and (fresh := self._with_sentence(text)) != text:
            self.file.write_text(fresh, encoding="utf-8")

    def faults(self) -> Iterator[Finding]:
        """Where the README says something else."""
        text = self._text()
        for place in _COUNT.finditer(text):
            if place.group(2) != self.sentence():
                line = text.count("\n", 0, place.start()) + 1
                message = f"the records in {self.records.folder.name} say `{self.sentence()}`: write that"
                yield Finding(self.file, line, message)

    def sentence(self) -> str:
        """How many pages with code have passed in all their languages, and where."""
        names = [name for name in self.tree.names if self.tree.page(name, self.tree.languages(name)[0]).executed]
        passed, date = {CPU: set(names), CUDA: set(names)}, ""
        found = {(one["device"], one["lang"], one["page"]): one for one in self.records.read()}
        for device, pages in passed.items():
            for name in names:
                ours = [found.get((device, language, name)) for language in LANGUAGES]
                if not all(one and one["status"] in {PASS, SAME} for one in ours):
                    pages.discard(name)
                date = max([date, *(one.get("date", "") for one in ours if one)])
        if not found:
            return f"{with_count(len(names), 'tutorial')}, none of them recorded yet"
        counts = (
            f"{len(passed[CPU])} of {with_count(len(names), 'tutorial')} passed on a CPU, {len(passed[CUDA])} on a GPU"
        )
        return f"{counts} (last run {date})"

    def _text(self) -> str:
        return self.file.read_text(encoding="utf-8") if self.file.is_file() else ""

    def _with_sentence(self, text: str) -> str:
        return _COUNT.sub(lambda place: f"{place.group(1)}{self.sentence()}{place.group(3)}", text)
