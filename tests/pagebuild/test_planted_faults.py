"""Faults planted into a copy of the project's pages, and the finding of each, without running or building anything."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pagetest.finding import Finding
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.suite import Suite

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
PAGE = "features/gradient_accumulation_with_booster"
OTHER, THIRD = "features/gradient_clipping_with_booster", "features/lazy_init"
ALONE = "concepts/planted"


class Fault(NamedTuple):
    """A fault: what plants it below docs/, and what must be said of which file."""

    plant: Callable[[Path], None]
    file: str
    message: str


def below_the_title(name: str, text: str, language: str = "en") -> Callable[[Path], None]:
    def plant(docs: Path) -> None:
        path = docs / "source" / language / f"{name}.md"
        title, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
        path.write_text(f"{title}\n\n{text}\n\n{rest}", encoding="utf-8")

    return plant


def first(name: str, old: str, new: str, language: str) -> Callable[[Path], None]:
    def plant(docs: Path) -> None:
        path = docs / "source" / language / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    return plant


def new_page(docs: Path) -> None:
    (docs / "source" / "en" / f"{ALONE}.md").write_text("# Planted\n\nText.\n\n<!-- doc-test-command: none -->\n")


def lost_page(docs: Path) -> None:
    sidebars = json.loads((docs / "sidebars.json").read_text(encoding="utf-8"))
    next(iter(sidebars.values()))[0]["items"].append("basics/gone")
    (docs / "sidebars.json").write_text(json.dumps(sidebars), encoding="utf-8")


ENGLISH, CHINESE = f"source/en/{PAGE}.md", f"source/zh-Hans/{PAGE}.md"
FAULTS = {
    "a dead link": Fault(below_the_title(PAGE, "[x](../basics/gone.md)"), ENGLISH, "leads to gone.md, which does not"),
    "a dead anchor": Fault(
        below_the_title(PAGE, "[x](../basics/booster_api.md#gone)"), ENGLISH, "leads to no heading of booster_api.md"
    ),
    "a missing image": Fault(below_the_title(PAGE, "![x](../images/gone.svg)"), ENGLISH, "leads to gone.svg, which"),
    "an unknown name in a hook": Fault(
        below_the_title(PAGE, "{{ autodoc:colossal.booster.Boster }}", "zh-Hans"),
        CHINESE,
        "colossal.booster.Boster",
    ),
    "a page without a translation": Fault(new_page, f"source/zh-Hans/{ALONE}.md", "translate it"),
    "a page in no sidebar": Fault(new_page, "sidebars.json", f"no sidebar lists the page `{ALONE}`"),
    "an entry of the sidebar without a page": Fault(
        lost_page, "sidebars.json", "lists `basics/gone`, which is no page"
    ),
    "a translation with a section less": Fault(first(OTHER, "\n## ", "\n### ", "zh-Hans"), f"{OTHER}.md", "heading"),
    "a translation with other code": Fault(
        first(THIRD, "```python\n", "```python\nplanted = 1\n", "zh-Hans"), f"zh-Hans/{THIRD}.md", "code"
    ),
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> list[Finding]:
    """What the session ``lint`` says, and the session ``site`` before it builds anything, of all faults together."""
    docs = tmp_path_factory.mktemp("project") / "docs"
    for folder in ("source", "figures"):
        shutil.copytree(ROOT / "docs" / folder, docs / folder)
    for name in ("sidebars.json", "versions.json", "glossary.json", "plugins.toml"):
        shutil.copy(ROOT / "docs" / name, docs)
    for plant in {fault.plant: None for fault in FAULTS.values()}:
        plant(docs)
    tree = Tree(docs / "source")
    return Suite(tree, LANGUAGES, ROOT / "src").check(tree.names)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_in_its_file(fault: Fault, findings) -> None:
    said = [finding.message for finding in findings if finding.path.as_posix().endswith(fault.file)]
    assert any(fault.message in message for message in said), "\n".join(map(str, findings))


def test_nothing_but_the_planted_faults_is_found(findings) -> None:
    planted = tuple(fault.file for fault in FAULTS.values())
    assert not [finding for finding in findings if not finding.path.as_posix().endswith(planted)]
