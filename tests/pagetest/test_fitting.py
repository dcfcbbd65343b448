"""Which records hold, and which pages have other code than theirs; no page runs here."""

from typing import Any

import pytest

from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.script import make_script
from pagetest.model.tree import Tree
from pagetest.results.run_finder import RunFinder
from pagetest.results.sample import sample

LANGUAGES = ("en", "zh-Hans")
OTHER = "other code or output than in its record"
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


# ------------------------------------------------------------------------------------------ what has changed


def add_recorded(docs, fitting: RunFinder, name: str, code: str = "print('one')", **other: Any) -> None:
    """A page and its records, which nothing but the page's own code holds for."""
    docs.add(name, code)
    for language in LANGUAGES:
        page = fitting.tree.page(name, language)
        facts = {"code_hash": make_script(page).code_hash, "command": page.command, "status": "SAME", **other}
        record(fitting, name, language, **facts, fingerprint="other", inputs="other", versions={}, blocks=[])


def changed(docs, capsys, *words: str) -> dict[str, list[str]]:
    """The pages that would run, and why."""
    assert docs.main("--changed", "--list", *words) == 0
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("    "):
            found[list(found)[-1]].append(line.strip())
        else:
            found[line.split()[0]] = []
    return found


def test_only_a_change_of_the_page_s_own_code_makes_it_run(docs, fitting, capsys) -> None:
    docs.write("prose", "# Title\n\n<!-- doc-test-command: none -->\n")
    for name in ("same", "words", "code", "command", "chinese", "device"):
        add_recorded(docs, fitting, name, **({"device": "cuda"} if name == "device" else {}))
    docs.add("new", "x = 1")
    words = docs.markdown("words", "print('one')  # a comment").replace("Text.", "Other text.")
    docs.write("words", words.replace("```\n\n<!--", "```\n\n```text output\ntwo\n```\n\n<!--"))
    docs.add("code", "print('two')")
    docs.add("command", "print('one')", "python -u command.py")
    docs.add("chinese", "print('二')", languages=("zh-Hans",))
    other = f"changed: {OTHER}"
    assert changed(docs, capsys) == {
        "chinese": [f"{other} (zh-Hans)"],
        "code": [f"{other} (en, zh-Hans)"],
        "command": [f"{other} (en, zh-Hans)"],
        "new": ["changed: no record (en, zh-Hans)"],
    }
    assert list(changed(docs, capsys, "--lang", "en")) == ["code", "command", "new"]
    assert changed(docs, capsys, "--device", "cpu")["device"] == ["changed: no record (en, zh-Hans)"]
    assert changed(docs, capsys, "same", "code") == {"same": ["named"], **changed(docs, capsys)}


@pytest.mark.parametrize(("shows", "reasons"), [("one", None), ("two", [f"changed: {OTHER} (en)"])])
def test_a_changed_output_block_makes_a_page_run(docs, fitting, capsys, shows, reasons) -> None:
    write(docs, shows=shows)
    page = fitting.tree.page("lesson", "en")
    record(fitting, code_hash=make_script(page).code_hash, command=page.command)
    assert changed(docs, capsys, "--lang", "en").get("lesson") == reasons


def test_nothing_changed_runs_nothing(docs, fitting, capsys) -> None:
    add_recorded(docs, fitting, "same")
    assert docs.main("--changed") == 0
    assert capsys.readouterr().out == "every page is as in its record\n0 passed, 0 failed\n"
    assert not docs.build.exists()


def test_a_broken_record_is_named(docs, fitting, capsys) -> None:
    add_recorded(docs, fitting, "same")
    (docs.published.folder / "cpu/en/same.json").write_text("{")
    assert docs.main("--changed") == 2
    assert "same.json:1: this should hold the record of a run, but it is no JSON" in capsys.readouterr().err


def test_another_purpose_takes_other_names() -> None:
    names = [f"page_{number}" for number in range(40)]
    assert len({sample(names, str(what), 6) for what in range(5)}) == 5
    assert set().union(*(sample(names, str(what), 6) for what in range(100))) == set(names)
