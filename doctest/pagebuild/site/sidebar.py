"""The sidebars of the website and their labels."""

import json
from typing import Any

from pagebuild.api.contents import API_FOLDER
from pagebuild.site.edition import BrokenInputError, Edition, read_json
from pagetest.checks.navigation import LABELS, check_navigation
from pagetest.model.tree import LANGUAGES

API_SIDEBAR = "apiSidebar"


def make_sidebars(edition: Edition) -> dict[str, Any]:
    """The author's sidebars, and one of the API pages, by their groups."""
    if findings := list(check_navigation(edition.tree, edition.sidebars.parent)):
        raise BrokenInputError(*findings)
    own = read_json(edition.sidebars, "write the sidebars")
    groups = [
        {
            "type": "category",
            "label": group.title[LANGUAGES[0]],
            "items": [f"{API_FOLDER}/{page.name}" for page in group.pages],
        }
        for group in edition.contents.groups
    ]
    return own | {API_SIDEBAR: [f"{API_FOLDER}/index", *groups]}


def make_labels(edition: Edition, language: str) -> dict[str, Any]:
    """The labels of the sidebars in another language, and the label of the version."""
    groups = {
        f"sidebar.{API_SIDEBAR}.category.{group.title[LANGUAGES[0]]}": {"message": group.title[language]}
        for group in edition.contents.groups
    }
    return (
        {"version.label": {"message": "main" if edition.is_current else edition.version}}
        | tutorial_labels(edition, language)
        | groups
    )


def tutorial_labels(edition: Edition, language: str) -> dict[str, Any]:
    """The labels of the author's sidebars in another language."""
    return read_json(edition.tree.source / language / LABELS, "translate the labels of the sidebar")


def categories(content: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """The categories of the tutorials: the key of the label, the label, and the pages, in their order."""
    found = []
    for name, items in content.items():
        for item in items:
            if isinstance(item, dict) and item.get("type") == "category":
                key = f"sidebar.{name}.category.{item['label']}"
                found.append((key, item["label"], list(_pages(item.get("items", [])))))
    return found


def _pages(items: list[Any]) -> list[str]:
    """The pages of a category and of those inside it."""
    pages = []
    for item in items:
        if isinstance(item, str):
            pages.append(item)
        elif item.get("type") == "doc":
            pages.append(item["id"])
        elif item.get("type") == "category":
            pages += _pages(item.get("items", []))
    return pages


def encode_json(content: Any) -> bytes:
    """JSON as all generated files hold it."""
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
