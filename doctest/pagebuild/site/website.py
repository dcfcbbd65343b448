"""All files that the website is built from: the present documentation and the released versions."""

from pathlib import Path
from typing import Any

from pagebuild.site.coverage import Coverage, released_coverage
from pagebuild.site.edition import BrokenInputError, Edition, current_edition, released_editions
from pagebuild.site.landing.data import landing_data
from pagebuild.site.pages import EditionWriter
from pagebuild.site.project import Project
from pagebuild.site.reference import missing_names
from pagebuild.site.search import search_synonyms
from pagebuild.site.sidebar import encode_json, make_labels, make_sidebars
from pagetest.finding import Finding
from pagetest.model.tree import LANGUAGES

OWNED = (
    "docs",
    "sidebars.json",
    "versions.json",
    "versioned_docs",
    "versioned_sidebars",
    *(f"i18n/{language}/docusaurus-plugin-content-docs" for language in LANGUAGES[1:]),
    "static/downloads",
    "data",
)
"""What belongs to the generator below the website's folder."""


def website_files(root: Path, project: Project, coverage: Coverage) -> dict[str, bytes]:
    """Makes every generated file, by its path below the website's folder."""
    current = current_edition(root)
    files = _edition_files(root, project, current, coverage)
    released = released_editions(root)
    for edition in released:
        files |= _edition_files(root, project, edition, released_coverage(edition))
    site = {
        "repository": project.repository,
        "version": current.reference["version"],
        "commit": project.commit,
        "date": project.date,
    }
    data = {
        "versions.json": [edition.version for edition in released],
        "data/site.json": site,
        "data/landing.json": landing_data(root, current, coverage),
        "data/search.json": search_synonyms(root, current),
    }
    return files | {name: encode_json(content) for name, content in data.items()}


def _edition_files(root: Path, project: Project, edition: Edition, coverage: Coverage) -> dict[str, bytes]:
    if not edition.tree.names:
        raise BrokenInputError(Finding(edition.tree.source, 1, "there is no page here: restore the pages"))
    if lost := missing_names(edition.objects):
        remedy = "correct what `python docs_build.py api` finds"
        raise BrokenInputError(
            *(Finding(edition.api, 1, f"{name} is public and not described: {remedy}") for name in lost)
        )
    data: dict[str, Any] = {
        edition.sidebars_target: make_sidebars(edition),
        edition.api_target: edition.reference,
    }
    data |= {edition.labels_target(language): make_labels(edition, language) for language in LANGUAGES[1:]}
    files = {name: encode_json(content) for name, content in data.items()}
    return files | EditionWriter(root, project, edition, coverage).files()
