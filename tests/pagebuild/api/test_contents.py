"""Each public name is on exactly one page of the reference, and the page to begin with shows a program that runs."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from public_names import names_without_legacy

from pagebuild.api.contents import ApiGroup, Contents, contents_faults, from_json, read_contents
from pagebuild.sphinx.reference import reference_pages
from pagetest.model.tree import LANGUAGES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = names_without_legacy()


@pytest.fixture(scope="module")
def contents(inventory) -> Contents:
    return read_contents(inventory.resolver.library)


def with_objects(contents: Contents, *names: str) -> Contents:
    """The contents with other objects on the first page."""
    first, *others = contents.groups
    page, *rest = first.pages
    return Contents(
        (ApiGroup(first.name, first.title, (replace(page, objects=names), *rest)), *others), contents.opening
    )


def faults(contents: Contents, inventory) -> list[str]:
    return [one.message for one in contents_faults(contents, inventory)]


@pytest.mark.parametrize("line", PUBLIC)
def test_every_public_name_is_on_one_page(line, contents, inventory) -> None:
    main = inventory.names.main(line.replace(": ", "."))
    assert [page.name for page in contents.pages for name in page.objects if name == main] != [], main
    assert Counter(name for page in contents.pages for name in page.objects)[main] == 1


def test_there_is_no_fault(contents, inventory) -> None:
    assert faults(contents, inventory) == []


def test_what_is_wrong_with_the_table_is_named(contents, inventory) -> None:
    names = contents.pages[0].objects
    assert faults(with_objects(contents, *names[:-1]), inventory) == [
        f"{names[-1]} is on no page of the API reference: add it to one"
    ]
    assert faults(with_objects(contents, *names, names[0], "colossal.Booster", "colossal.gone"), inventory) == [
        "colossal.Booster is the main name of no public object: it is described as colossal.booster.Booster",
        "colossal.gone is the main name of no public object: remove it",
        f"{names[0]} is on 2 pages of the API reference: keep one",
    ]
    twice = Contents((*contents.groups, ApiGroup("index", {}, ())), contents.opening)
    assert faults(twice, inventory) == ["2 pages or groups are called `index`: rename all but one"]
    first, *others = contents.groups
    page = replace(first.pages[0], without=("colossal.booster.Booster.gone",))
    left_out = Contents((replace(first, pages=(page, *first.pages[1:])), *others), contents.opening)
    assert faults(left_out, inventory) == [
        "colossal.booster.Booster.gone is left out, and no object has this name: remove it"
    ]


def test_members_that_readers_do_not_call_are_left_out_of_the_sphinx_site(contents, inventory) -> None:
    pages = reference_pages(contents, inventory, "en")
    (left_out,) = [page for page in contents.pages if page.without]
    assert "class:: colossal.pipeline.StageModules" in pages[left_out.name]
    assert not [name for name in left_out.without if name in pages[left_out.name]]


def test_the_reference_holds_its_contents(contents, reference) -> None:
    assert from_json(reference.contents.as_json()) == contents


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_to_begin_with_shows_a_program_that_runs(language, contents) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", contents.opening[language], re.DOTALL)
    overview = ROOT / "docs" / "source" / language / "concepts" / "colossal_overview.md"
    assert program in overview.read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_to_begin_with_leads_to_pages(language, contents) -> None:
    links = re.findall(r"\]\(([^)]+)\.md\)", contents.opening[language])
    tutorials = {link.removeprefix("../") for link in links if link.startswith("../")}
    assert {link for link in links if not link.startswith("../")} <= {page.name for page in contents.pages}
    assert all((ROOT / "docs" / "source" / language / f"{name}.md").is_file() for name in tutorials)
    assert {"booster", "launch", "parallel_mesh", "checkpoint_io", "hybrid_parallel_plugin"} <= set(links)
