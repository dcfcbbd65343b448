"""Which records hold, and which pages run nevertheless; no page runs here."""

from typing import Any

import pytest

from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.tree import Tree
from pagetest.results.run_finder import RunFinder
from pagetest.results.sample import sample
from pagetest.results.selection import SAMPLE_SIZE, select_pages

LANGUAGES = ("en", "zh-Hans")
NOW = {"inputs": "harness", "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"}}
SHOWN = "# Title\n\n```python\nprint('{}')\n```\n\n```text output\n{}\n```\n\n<!-- doc-test-command: python {}.py -->\n"


@pytest.fixture
def fitting(docs) -> RunFinder:
    graph = ImportGraph(docs.source.parent / "src")
    return RunFinder([docs.published, docs.records], Tree(docs.source), graph, "cpu", NOW)


def write(docs, name: str = "lesson", language: str = "en", says: str = "one", shows: str = "one") -> None:
    docs.write(name, SHOWN.format(says, shows, name), language)


def record(fitting: RunFinder, name: str = "lesson", language: str = "en", **other: Any) -> None:
    """Enters the record of a run that holds, but for what is given."""
    page = fitting.tree.page(name, language)
    block = {"printed": "one\n", "figures": []}
    facts = {"fingerprint": fingerprint(page, fitting.graph), "blocks": [block], **NOW}
    entry = {"page": name, "lang": language, "device": "cpu", "status": "PASS", **facts, **other}
    fitting.records[0].write(entry, {"a.svg": b"<svg/>"})


def holds(fitting: RunFinder, language: str = "en") -> bool:
    return fitting.find(fitting.tree.page("lesson", language)) is not None


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({}, True),
        ({"versions": {"python": "3.11.2", "torch": "2.13.0+cu130"}}, True),
        ({"versions": {"python": "3.12.7", "torch": "2.13.0+cpu"}}, False),
        ({"versions": {"python": "3.11.7", "torch": "2.12.0+cpu"}}, False),
        ({"versions": {}}, False),
        ({"inputs": "another harness"}, False),
        ({"fingerprint": "other code"}, False),
        ({"status": "FAIL"}, False),
        ({"blocks": []}, False),
        ({"blocks": [{"printed": "two\n", "figures": []}]}, False),
        ({"blocks": [{"printed": "one\n", "figures": ["a.svg"]}]}, True),
        ({"blocks": [{"printed": "one\n", "figures": ["b.svg"]}]}, False),
        ({"device": "cuda"}, False),
    ],
)
def test_a_record_holds_for_the_same_code_harness_and_versions(docs, fitting, other, found) -> None:
    write(docs)
    assert not holds(fitting)
    record(fitting, **other)
    assert holds(fitting) == found


def test_the_first_place_with_a_record_that_holds_counts(docs, fitting) -> None:
    write(docs)
    record(fitting, status="FAIL")
    assert not holds(fitting)
    record(RunFinder(fitting.records[1:], fitting.tree, fitting.graph, "cpu", NOW))
    run = fitting.find(fitting.tree.page("lesson", "en"))
    assert run is not None
    assert (run.records, run.printed) == (docs.records, ["one\n"])


def test_the_run_of_an_original_is_that_of_a_translation_with_its_code(docs, fitting) -> None:
    write(docs)
    write(docs, language="zh-Hans")
    record(fitting)
    assert holds(fitting, "zh-Hans")
    write(docs, language="zh-Hans", says="一", shows="一")
    assert not holds(RunFinder(fitting.records, Tree(docs.source), fitting.graph, "cpu", NOW), "zh-Hans")


def test_pages_without_a_record_in_each_language_run_and_so_does_a_sample(docs, fitting) -> None:
    names = [f"page_{number}" for number in range(12)]
    for name in names:
        for language in LANGUAGES:
            write(docs, name, language, says=f"{language} one" if name == names[0] else "one", shows="one")
        record(fitting, name)
    selection = select_pages(names, LANGUAGES, fitting, "commit")
    assert set(selection.runs) == set(names[1:])
    assert selection.sample == sample(names[1:], "commit", SAMPLE_SIZE)
    assert len(selection.sample) == SAMPLE_SIZE
    assert selection.names_to_run(names) == [name for name in names if name == names[0] or name in selection.sample]


def test_another_commit_tries_other_pages() -> None:
    names = [f"page_{number}" for number in range(40)]
    assert len({sample(names, str(commit), SAMPLE_SIZE) for commit in range(5)}) == 5
    assert set().union(*(sample(names, str(commit), SAMPLE_SIZE) for commit in range(100))) == set(names)
