"""The landing page's data, put together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagebuild.runs import DEVICES
from pagebuild.site.badges import VERIFIED
from pagebuild.site.coverage import Coverage
from pagebuild.site.edition import BrokenInputError, Edition, read_json
from pagebuild.site.front_matter import first_sentence, page_title
from pagebuild.site.landing.features import feature_matrix
from pagebuild.site.landing.measured import measured_result
from pagebuild.site.landing.models import model_matrix
from pagebuild.site.landing.plugins import CHOICES, check_choices, offered_plugins
from pagebuild.site.landing.texts import labels_of
from pagebuild.site.sidebar import categories, tutorial_labels
from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.model.reader import read_page
from pagetest.model.tree import LANGUAGES

PAGE = "concepts/colossal_overview"

INSTALL_PAGE, INSTALL = "get_started/installation", 'pip install -c constraints.txt -e ".[docs]"'
"""The page that shows how to install the library, and its line for what the example needs."""

GOALS = {
    "train": "tutorials/finetune",
    "fit": "tutorials/fit_a_larger_model",
    "nodes": "tutorials/several_nodes",
    "serve": "advanced_tutorials/opt_service",
}
"""What readers come for, and the page that each goal leads to."""

PROGRAM = "train.py"
"""What readers call the example when they save it."""


def landing_example(readme: Path, page: Page) -> dict[str, str]:
    """Takes the first program of the README, after making sure that it is the first that the page runs."""
    program = next(iter(read_page(readme, page.language, "README").python), None)
    if program is None:
        raise BrokenInputError(Finding(readme, 1, "the README shows no program: take one from a page"))
    if not page.runnable or program.source != page.runnable[0].source:
        message = f"this program is not the first one of {page.path}, where it would be run: make both agree"
        raise BrokenInputError(Finding(readme, program.line, message))
    command = page.command.replace(f"{page.stem}.py", PROGRAM)
    return {"source": program.source.rstrip("\n"), "page": page.name, "command": command}


def install_line(page: Page) -> dict[str, str]:
    """The command that installs the library, after making sure that its page shows it."""
    if INSTALL not in page.lines:
        raise BrokenInputError(Finding(page.path, 1, f"the page does not show the line `{INSTALL}`: make both agree"))
    return {"command": INSTALL, "page": page.name}


def landing_data(root: Path, edition: Edition, coverage: Coverage) -> dict[str, Any]:
    """Everything that the landing page shows."""
    check_choices(offered_plugins())
    shown = tutorial_cards(edition, coverage)
    proof = count_verified([card for category in shown for card in category["pages"]])
    data = {
        "example": landing_example(root / "README.md", edition.tree.page(PAGE, LANGUAGES[0])),
        "install": install_line(edition.tree.page(INSTALL_PAGE, LANGUAGES[0])),
        "goals": [
            {"key": key, "page": page, "label": labels_of("goals", key), "text": labels_of("goal_texts", key)}
            for key, page in GOALS.items()
        ],
        "measured": measured_result(coverage.results),
        "tutorials": shown,
        "proof": proof,
        "plugins": [choice.row() for choice in CHOICES],
        "features": feature_matrix(proof),
        "models": model_matrix(),
    }
    _check_pages(data, edition)
    return data


def tutorial_cards(edition: Edition, coverage: Coverage) -> list[dict[str, Any]]:
    """The categories of the sidebar with their pages."""
    content = read_json(edition.sidebars, "write the sidebars")
    translated = tutorial_labels(edition, LANGUAGES[1])
    return [
        {
            "label": dict(zip(LANGUAGES, (label, translated[key]["message"]), strict=True)),
            "pages": [_make_card(name, edition, coverage) for name in names],
        }
        for key, label, names in categories(content)
    ]


def count_verified(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many tutorials the runs verify; one counts that is verified in every language."""
    # Returns how many have code, the day of the last run, and for each device on which any ran how many are
    # verified.
    programs = [card["badges"] for card in cards if card["hasCode"]]
    every = [badge for badges in programs for shown in badges.values() for badge in shown]

    def is_verified(badges: Mapping[str, Sequence[Mapping[str, Any]]], device: str) -> bool:
        states = [{badge["device"]: badge["state"] for badge in shown}.get(device) for shown in badges.values()]
        return all(state == VERIFIED for state in states)

    return {
        "programs": len(programs),
        "lastDate": max((badge.get("date", "") for badge in every), default=""),
        "verified": {
            device: sum(is_verified(badges, device) for badges in programs)
            for device in DEVICES
            if any(badge["device"] == device for badge in every)
        },
    }


def _make_card(name: str, edition: Edition, coverage: Coverage) -> dict[str, Any]:
    pages = {language: edition.tree.page(name, language) for language in LANGUAGES}

    def each(function: Any) -> Mapping[str, Any]:
        return {language: function(page) for language, page in pages.items()}

    return {
        "name": name,
        "title": each(page_title),
        "description": each(first_sentence),
        "hasCode": any(page.executed for page in pages.values()),
        "badges": each(lambda page: [one for one in coverage.results.badges(page) if one["device"] in DEVICES]),
    }


def _check_pages(data: Mapping[str, Any], edition: Edition) -> None:
    """The pages that rows lead to exist."""
    rows = [*data["goals"], *data["plugins"], *data["features"]["rows"], *data["models"]["rows"]]
    lost = [row for row in rows if row["page"] and row["page"] not in edition.tree.names]
    messages = (f"the row {row['key']} leads to {row['page']}, which is no page: correct it" for row in lost)
    if lost:
        raise BrokenInputError(*(Finding(Path(__file__).parent, 1, message) for message in messages))
