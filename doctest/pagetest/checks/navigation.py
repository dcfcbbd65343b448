"""The files that lead readers to the pages: the sidebar, its labels in other languages, and the list of versions."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pagetest.finding import Finding
from pagetest.model.page import CONCEPT, HOW_TO, INTERNALS, TUTORIAL
from pagetest.model.tree import LANGUAGES, Tree

LABELS = "sidebar_category_translation.json"
KINDS = {
    "Get started": (TUTORIAL, HOW_TO),
    "Tutorials": (TUTORIAL,),
    "Choose and configure": (TUTORIAL, HOW_TO),
    "Training techniques": (TUTORIAL, HOW_TO),
    "Memory": (TUTORIAL, HOW_TO),
    "Model parallelism": (TUTORIAL, HOW_TO),
    "Operations": (TUTORIAL, HOW_TO),
    "After training": (TUTORIAL, HOW_TO),
    "Concepts": (CONCEPT,),
    "Internals": (INTERNALS,),
    "Older API": (TUTORIAL, HOW_TO),
}
"""The kinds of pages in a category of the sidebar; one that is not named here has any."""


def check_navigation(tree: Tree, folder: Path | None = None) -> Iterator[Finding]:
    """The sidebar lists exactly the pages that exist; its labels are translated; the versions are a list of names."""
    folder = folder or tree.source.parent
    for name, check in (("sidebars.json", _sidebar_faults), ("versions.json", _version_faults)):
        path = folder / name
        if path.is_file():
            yield from _check_file(path, check, tree.names)
    yield from _kind_faults(tree, _sidebars(folder))
    labels = label_keys(_sidebars(folder))
    for language in LANGUAGES[1:]:
        path = tree.source / language / LABELS
        if path.is_file():
            yield from _check_file(path, _label_faults, labels)
        elif labels:
            yield Finding(
                path, 1, f"the sidebar has the label `{labels[0]}`, and no file translates it: write {LABELS}"
            )


def _kind_faults(tree: Tree, sidebars: Any) -> Iterator[Finding]:
    """Readers of a category find one kind of page in it."""
    for category in _categories(sidebars):
        kinds = KINDS.get(category["label"], ())
        for name in set(_documents(category.get("items", []))) & set(tree.names) if kinds else ():
            for page in (tree.page(name, language) for language in tree.languages(name)):
                if page.front is None:
                    wanted = "a page of this category has front matter: write kind, outcome, minutes and devices"
                    yield Finding(page.path, 1, f"{wanted} between two lines `---` at the top")
                elif page.front.kind not in kinds:
                    wanted = f"`{category['label']}` of the sidebar is the place of {' and '.join(kinds)} pages"
                    yield Finding(page.path, 2, f"{wanted}, this one is of kind {page.front.kind}: move its entry")


def _categories(sidebars: Any) -> Iterator[dict[str, Any]]:
    items = [item for sidebar in (sidebars.values() if isinstance(sidebars, dict) else ()) for item in sidebar]
    yield from (item for item in items if isinstance(item, dict) and "label" in item)


def label_keys(sidebars: Any) -> list[str]:
    """The keys of the sidebars' labels, as Docusaurus spells them: `sidebar.<sidebar>.category.<label>`."""
    sidebars = sidebars if isinstance(sidebars, dict) else {}
    return list(
        dict.fromkeys(f"sidebar.{name}.{label}" for name, items in sidebars.items() for label in _labels(items))
    )


def _check_file(path: Path, check: Any, expected: Sequence[str]) -> Iterator[Finding]:
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        yield Finding(path, error.lineno, f"this is no JSON ({error.msg}): correct it")
        return
    for line, message in check(content, text, expected):
        yield Finding(path, line, message)


def _sidebar_faults(content: Any, text: str, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    listed = list(_documents(content))
    for name in sorted(set(listed) - set(names)):
        yield (
            _line_of(f'"{name}"', text),
            f"the sidebar lists `{name}`, which is no page: write the page or drop the entry",
        )
    for name in sorted(set(names) - set(listed)):
        yield 1, f"no sidebar lists the page `{name}`: add it where readers look for it"
    for name in sorted({name for name in listed if listed.count(name) > 1}):
        yield _line_of(f'"{name}"', text), f"the sidebar lists `{name}` more than once: keep one entry"


def _version_faults(content: Any, _text: str, _names: Sequence[str]) -> Iterator[tuple[int, str]]:
    if not isinstance(content, list) or not all(isinstance(version, str) for version in content):
        yield (
            1,
            f"the versions are a JSON list of strings, and this is {content!r}: write `[]` before the first release",
        )


def _label_faults(content: Any, text: str, keys: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Every label has a translation, and nothing else has."""
    if not isinstance(content, dict):
        yield 1, "the labels are a JSON object of `key: {message: translation}`, and this is none: write one"
        return
    for key in sorted(set(keys) - set(content)):
        yield 1, f"no translation of the sidebar's label `{key}`: add the key, with a `message`"
    for key, entry in content.items():
        line = _line_of(f'"{key}"', text)
        if key not in keys:
            yield line, f"`{key}` is no label of the sidebar: correct the key or drop it"
        elif not (isinstance(entry, dict) and isinstance(entry.get("message"), str) and entry["message"].strip()):
            yield line, f"the label `{key}` has no text: give it a `message`"


def _sidebars(folder: Path) -> Any:
    """The sidebars, empty where there are none that can be read: that is another finding."""
    try:
        return json.loads((folder / "sidebars.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def _labels(item: Any) -> Iterator[str]:
    """The labels of categories, links and documents with what they label, outer ones first."""
    if isinstance(item, list):
        for part in item:
            yield from _labels(part)
    elif isinstance(item, dict) and "type" in item:
        if "label" in item:
            yield f"{item['type']}.{item['label']}"
        yield from _labels(item.get("items", []))
    elif isinstance(item, dict):
        for label, items in item.items():
            yield f"category.{label}"
            yield from _labels(items)


def _documents(item: Any) -> Iterator[str]:
    """The page names in a sidebar, in Docusaurus' form: strings, documents, categories and their links."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, list):
        for part in item:
            yield from _documents(part)
    elif isinstance(item, dict) and item.get("type") in {"doc", "ref"}:
        yield item["id"]
    elif isinstance(item, dict) and item.get("type") == "category":
        yield from _documents([item.get("link") or [], item.get("items", [])])
    elif isinstance(item, dict) and "type" not in item:
        yield from _documents(list(item.values()))


def _line_of(fragment: str, text: str) -> int:
    return next((number for number, line in enumerate(text.split("\n"), 1) if fragment in line), 1)
