"""The full reference: every entry, and what is wrong with it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagebuild.api.communication import CommunicationGraph
from pagebuild.api.contents import Contents, contents_faults, read_contents
from pagebuild.api.docstring_checks import DocstringChecker
from pagebuild.api.docstrings import read_docstrings
from pagebuild.api.entry import Entry, make_entry
from pagebuild.api.inventory import Inventory
from pagebuild.api.library import Library
from pagebuild.api.mdast import UnsupportedMarkupError
from pagebuild.api.sphinx_warnings import warning_finding
from pagebuild.api.target import Resolver, Target
from pagetest.finding import Finding
from pagetest.model.page import Page


@dataclass(frozen=True)
class Reference:
    """The API reference of a library."""

    version: str
    objects: Mapping[str, Entry]
    contents: Contents
    findings: tuple[Finding, ...]  # what is wrong: names that pages ask for in vain, docstrings that cannot be read

    @property
    def text(self) -> str:
        """The file api.json."""
        content = {"version": self.version, "contents": self.contents.as_json(), "objects": self.objects}
        return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def build_reference(library: Library, pages: Iterable[Page]) -> Reference:
    """Describes all public objects of a library, and all that its pages ask for."""
    # The library must be importable.
    resolver = Resolver(library)
    public = Inventory(resolver)
    asked = [(hook.text, page.path, hook.line) for page in pages for hook in page.hooks]
    faults = {name: public.why_unknown(name) for name, _, _ in asked}
    findings = [Finding(path, line, fault) for name, path, line in asked if (fault := faults[name])]
    inventory = Inventory(resolver, tuple(sorted(name for name, fault in faults.items() if not fault)))
    docstrings, warnings = read_docstrings(inventory.main.values(), resolver)
    findings += [warning_finding(line, resolver) for line in warnings]
    objects = {}
    for name, target in inventory.entries.items():
        try:
            objects[name] = make_entry(target, docstrings.get(inventory.names.main(name) or "", []), inventory)
        except UnsupportedMarkupError as error:
            findings.append(_finding_at(target, resolver, str(error)))
    coverage = DocstringChecker(inventory, CommunicationGraph(library))
    findings += [gap for name in inventory.main if name in objects for gap in coverage.gaps(objects[name])]
    version = getattr(resolver.resolve(library.package).value, "__version__", "0")
    contents = read_contents(library)
    findings += contents_faults(contents, public)
    return Reference(version, objects, contents, tuple(sorted(set(findings))))


def _finding_at(target: Target, resolver: Resolver, message: str) -> Finding:
    node = resolver.node(target)
    return Finding(resolver.source(target).path, node.lineno if node else 1, f"{target.name}: {message}")


def write_reference(reference: Reference, path: Path) -> None:
    """Writes api.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference.text, encoding="utf-8")


def statistics(reference: Reference) -> Mapping[str, Any]:
    """How many objects of each kind there are."""
    kinds = [entry["kind"] for entry in reference.objects.values() if not entry["alias_of"]]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}
