"""Which pages have other code or show other output than their records: what a change of pages must run, and no more."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagetest.model.page import Page
from pagetest.model.script import make_script
from pagetest.model.tree import Tree
from pagetest.outputs.blocks import stale_outputs
from pagetest.results.records import Records
from pagetest.results.run_finder import printed_by_line


@dataclass(frozen=True)
class ChangedPages:
    """Compares pages with records by their own text alone: not by what they import, or were run with."""

    tree: Tree
    languages: Sequence[str]
    records: Records
    devices: Sequence[str]  # the record of any of them counts

    @property
    def reasons(self) -> dict[str, Sequence[str]]:
        """Why each changed page counts as changed, by its name."""
        found = {name: tuple(self._reasons(name)) for name in self.tree.names}
        return {name: reasons for name, reasons in found.items() if reasons}

    def _reasons(self, name: str) -> Iterator[str]:
        there = [language for language in self.tree.languages(name) if language in self.languages]
        changes = {language: self._change(self.tree.page(name, language)) for language in there}
        for change in sorted(filter(None, set(changes.values()))):
            yield f"changed: {change} ({', '.join(one for one in there if changes[one] == change)})"

    def _change(self, page: Page) -> str:
        script = make_script(page)
        found = [self.records.find(device, page.language, page.name) for device in self.devices]
        known = [record for record in found if record]
        if script.is_empty or any(_shows(page, one) for one in known if _is_of(one, script.code_hash, page.command)):
            return ""
        return "other code or output than in its record" if known else "no record"


def _is_of(record: Mapping[str, Any], code_hash: str, command: str | None) -> bool:
    return (record.get("code_hash"), record.get("command")) == (code_hash, command)


def _shows(page: Page, record: Mapping[str, Any]) -> bool:
    """Whether the page shows what was printed; the record of a translation leaves that to the original's."""
    return not record.get("blocks") or not stale_outputs(page, printed_by_line(page, record))
