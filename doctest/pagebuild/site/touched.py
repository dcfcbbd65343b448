"""The pages of the website that a change touches: the browser opens them in addition to one of each template."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from pagebuild.api.contents import API_FOLDER, contents_files
from pagebuild.changes import changed_files_since_base
from pagebuild.site.edition import Edition, current_edition, released_editions
from pagebuild.site.pages import IMAGES
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES
from pagetest.results.sample import sample

SAMPLE = 24
"""How many pages are opened where it is unknown which ones a change touches."""

_WEBSITE = ("docs/website", "doctest/pagebuild/site", "doctest/pagebuild/runs.py")


@dataclass(frozen=True)
class TouchedPages:
    """What the browser has to open."""

    reason: str
    pages: tuple[str, ...] | None  # their addresses; None for all

    def write(self, path: Path) -> None:
        """Writes the choice for the website's own tests."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"pages": self.pages}) + "\n", encoding="utf-8")


def find_touched_pages(root: Path, base: str = "") -> TouchedPages:
    """The pages whose text, pictures or documented objects have changed."""
    # A change of the website's own code touches every page. Without a base there is no change to look at.
    found, changed = changed_files_since_base(root, base)
    editions = [current_edition(root), *released_editions(root)]
    addresses = {address: sources for edition in editions for address, sources in _page_sources(root, edition)}
    if changed is None:
        some = sorted(sample(addresses, "opened pages", SAMPLE))
        return TouchedPages("always the same, since git knows no earlier commit", tuple(some))
    code = [path for path in changed if any(path.is_relative_to(root / part) for part in _WEBSITE)]
    if code:
        return TouchedPages(f"every page, since {min(code).relative_to(root)} differs from {found[:12]}", None)
    pages = tuple(address for address, sources in addresses.items() if sources & changed)
    return TouchedPages(f"those that differ from {found[:12]}", pages)


def _page_sources(root: Path, edition: Edition) -> Iterator[tuple[str, frozenset[Path]]]:
    """The address of each page of an edition, and the files that it shows."""
    for language in LANGUAGES:
        prefix = _address_prefix(root, edition, language)
        for name in edition.tree.names:
            if language in edition.tree.languages(name):
                page = edition.tree.page(name, language)
                yield f"{prefix}{name}/", frozenset(_source_files(root, edition, page))
        opening = contents_files(root)[1 + LANGUAGES.index(language)] if edition.is_current else edition.api
        yield f"{prefix}{API_FOLDER}/", frozenset([opening])
        for one in edition.contents.pages:
            yield f"{prefix}{API_FOLDER}/{one.name}/", frozenset(_definition_files(root, edition, one.objects))


def _address_prefix(root: Path, edition: Edition, language: str) -> str:
    """The newest release has the addresses without a version, as Docusaurus gives them."""
    released = [one.version for one in released_editions(root)]
    version = "next/" if edition.is_current else f"{edition.version}/"
    is_latest = not released if edition.is_current else edition.version == released[0]
    locale = "" if language == LANGUAGES[0] else f"{language}/"
    return f"/{locale}docs/{'' if is_latest else version}"


def _source_files(root: Path, edition: Edition, page: Page) -> Iterator[Path]:
    yield page.path
    pictures = (link.text for link in page.links if link.text.lower().endswith(IMAGES))
    yield from ((page.path.parent / unquote(picture)).resolve() for picture in pictures)
    yield from _definition_files(root, edition, [hook.text for hook in page.hooks])


def _definition_files(root: Path, edition: Edition, names: Iterable[str]) -> Iterator[Path]:
    """The files that define some objects and their members; those of a release do not change with the code."""
    if not edition.is_current:
        yield edition.api
        return
    for name in names:
        found = edition.objects.get(name)
        members = found["members"] if found and found["kind"] != "module" else ()
        described = (one for one in (found, *map(edition.objects.get, members)) if one)
        yield from (root / one["source"]["file"] for one in described)
