"""The landing page's data, put together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagebuild.site.edition import BrokenInputError, Edition, read_json
from pagebuild.site.landing.example import PAGE, example
from pagebuild.site.landing.features import feature_matrix
from pagebuild.site.landing.models import model_matrix
from pagebuild.site.landing.plugins import CHOICES, check_choices, offered_plugins
from pagebuild.site.pages import Knowledge
from pagebuild.site.sidebar import categories, labels
from pagebuild.site.words import first_sentence, title
from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES


def landing(root: Path, edition: Edition, knowledge: Knowledge) -> dict[str, Any]:
    """Everything that the landing page shows.

    Args:
        root: The project's root.
        edition: The documentation as it is now.
        knowledge: What is known about its pages.

    Raises:
        BrokenInputError: The library and the tables here disagree, or an input is missing.
    """
    check_choices(offered_plugins())
    data = {
        "example": example(root / "README.md", edition.tree.page(PAGE, LANGUAGES[0])),
        "tutorials": tutorials(edition, knowledge),
        "plugins": [choice.row() for choice in CHOICES],
        "features": feature_matrix(knowledge.results.has_run_on),
        "models": model_matrix(),
    }
    _check_pages(data, edition)
    return data


def tutorials(edition: Edition, knowledge: Knowledge) -> list[dict[str, Any]]:
    """The categories of the sidebar with their pages."""
    content = read_json(edition.sidebars, "write the sidebars")
    translated = labels(edition, LANGUAGES[1])
    return [
        {
            "label": dict(zip(LANGUAGES, (label, translated[key]["message"]), strict=True)),
            "pages": [_card(name, edition, knowledge) for name in names],
        }
        for key, label, names in categories(content)
    ]


def _card(name: str, edition: Edition, knowledge: Knowledge) -> dict[str, Any]:
    pages = {language: edition.tree.page(name, language) for language in LANGUAGES}

    def each(function: Any) -> Mapping[str, Any]:
        return {language: function(page) for language, page in pages.items()}

    def badges(page: Page) -> list[dict[str, Any]]:
        return knowledge.badges(page, edition.tree)

    return {"name": name, "title": each(title), "description": each(first_sentence), "badges": each(badges)}


def _check_pages(data: Mapping[str, Any], edition: Edition) -> None:
    """The pages that rows lead to exist."""
    rows = [*data["plugins"], *data["features"]["rows"], *data["models"]["rows"]]
    lost = [row for row in rows if row["page"] and row["page"] not in edition.tree.names]
    messages = (f"the row {row['key']} leads to {row['page']}, which is no page: correct it" for row in lost)
    if lost:
        raise BrokenInputError(*(Finding(Path(__file__).parent, 1, message) for message in messages))
