"""The pages of the API reference: which public object stands on which page, and what readers see first."""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagebuild.api.inventory import Inventory
from pagebuild.api.library import Library
from pagetest.finding import Finding
from pagetest.model.tree import LANGUAGES

API_FOLDER = "api"
"""The folder of a site that holds the reference; the page to begin with is its index."""


@dataclass(frozen=True)
class ApiPage:
    """A page that describes some objects."""

    name: str
    title: Mapping[str, str]  # by language
    objects: tuple[str, ...]  # main names, in the order in which they are described
    without: tuple[str, ...] = ()  # their members that other packages of the library call, and readers do not


@dataclass(frozen=True)
class ApiGroup:
    """Pages of one theme, which stand together in the sidebar."""

    name: str
    title: Mapping[str, str]
    pages: tuple[ApiPage, ...]


@dataclass(frozen=True)
class Contents:
    """All pages of the reference."""

    groups: tuple[ApiGroup, ...]
    opening: Mapping[str, str]  # the page to begin with, as Markdown, by language

    @property
    def pages(self) -> tuple[ApiPage, ...]:
        """The pages of all groups."""
        return tuple(page for group in self.groups for page in group.pages)

    def chosen(self, names: tuple[str, ...]) -> "Contents":
        """Only the pages with these names, and the groups that have one."""
        if set(names) >= {page.name for page in self.pages}:
            return self
        groups = [
            ApiGroup(group.name, group.title, tuple(page for page in group.pages if page.name in names))
            for group in self.groups
        ]
        # The page to begin with links to pages that are missing then; its heading is left.
        headings = {language: text.partition("\n")[0] for language, text in self.opening.items()}
        return Contents(tuple(group for group in groups if group.pages), headings)

    def as_json(self) -> dict[str, Any]:
        """What api.json holds."""
        return asdict(self)


def from_json(content: Mapping[str, Any]) -> Contents:
    """The contents that api.json holds."""
    groups = [
        ApiGroup(one["name"], one["title"], tuple(_page(page) for page in one["pages"])) for one in content["groups"]
    ]
    return Contents(tuple(groups), content["opening"])


def contents_files(root: Path) -> tuple[Path, ...]:
    """The table of pages, and the page to begin with in each language."""
    folder = root / "docs" / API_FOLDER
    return folder / "contents.toml", *(folder / f"{language}.md" for language in LANGUAGES)


def read_contents(library: Library) -> Contents:
    """The contents that a project lays down; without any, each module that offers something is a page."""
    table, *openings = contents_files(library.root)
    if not table.is_file():
        pages = tuple(_module_page(module, names) for module, names in library.modules.items() if names)
        opening = _in_all_languages(f"# {library.package}\n")
        return Contents((ApiGroup("modules", _in_all_languages(library.package), pages),), opening)
    groups = tomllib.loads(table.read_text(encoding="utf-8"))["group"]
    texts = (path.read_text(encoding="utf-8") for path in openings)
    return from_json({"groups": groups, "opening": dict(zip(LANGUAGES, texts, strict=True))})


def contents_faults(contents: Contents, inventory: Inventory) -> Iterator[Finding]:
    """Public objects that are on no page or on several, and what else is wrong with the table."""
    library = inventory.resolver.library
    table = contents_files(library.root)[0]
    if not table.is_file():
        return
    places = Counter(name for page in contents.pages for name in page.objects)
    public = {name for name, target in inventory.main.items() if target.owner is None}
    for name in sorted(public - places.keys()):
        yield Finding(table, 1, f"{name} is on no page of the API reference: add it to one")
    for name in sorted(places.keys() - public):
        main = inventory.names.main(name)
        remedy = f"it is described as {main}" if main else "remove it"
        yield Finding(table, 1, f"{name} is the main name of no public object: {remedy}")
    for name in sorted(name for name, count in places.items() if count > 1):
        yield Finding(table, 1, f"{name} is on {places[name]} pages of the API reference: keep one")
    for name in sorted({name for page in contents.pages for name in page.without} - inventory.main.keys()):
        yield Finding(table, 1, f"{name} is left out, and no object has this name: remove it")
    files = Counter(["index", *(one.name for one in (*contents.groups, *contents.pages))])
    for name in sorted(name for name, count in files.items() if count > 1):
        yield Finding(table, 1, f"{files[name]} pages or groups are called `{name}`: rename all but one")


def _page(content: Mapping[str, Any]) -> ApiPage:
    return ApiPage(content["name"], content["title"], tuple(content["objects"]), tuple(content.get("without", ())))


def _module_page(module: str, names: tuple[str, ...]) -> ApiPage:
    objects = (module, *(f"{module}.{name}" for name in names))
    return ApiPage(module, _in_all_languages(module), objects)


def _in_all_languages(text: str) -> dict[str, str]:
    return dict.fromkeys(LANGUAGES, text)
