"""What is recorded, and what runs afterwards: pages with other code than in their records, and named ones."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow

NAMES = [f"page_{number}" for number in range(4)]
COUNT = "with open({!r}, 'a') as file:\n    file.write('{}\\n')\n"


def counted(docs, name: str) -> str:
    """Code that notes down, outside of the page's folder, that it runs, and prints something."""
    return COUNT.format(str(docs.source.parent / "diary"), name) + f"print('{name}')\nx = 1\ny = 2"


def ran(docs) -> list[str]:
    """The pages that ran since this was asked last."""
    diary = docs.source.parent / "diary"
    names = diary.read_text().split() if diary.exists() else []
    diary.unlink(missing_ok=True)
    return sorted(names)


@pytest.fixture
def recorded(docs) -> Any:
    """Pages, all of them recorded."""
    for name in NAMES:
        docs.add(name, counted(docs, name))
    docs.write("prose", "# Title\n\n<!-- doc-test-command: none -->\n")
    done = docs.run("--record")
    assert done.returncode == 0, done.stdout
    assert ran(docs) == NAMES
    return docs


def test_what_has_changed_runs_and_what_is_named(recorded) -> None:
    recorded.add("page_2", counted(recorded, "page_2") + "\nz = 3")
    done = recorded.run("--changed", "page_1")
    assert done.returncode == 0, done.stdout
    assert ran(recorded) == ["page_1", "page_2"]
    assert done.stdout.splitlines()[:2] == [
        "page_1   named",
        "page_2   changed: other code or output than in its record (en, zh-Hans)",
    ]
    assert done.stdout.endswith("4 passed, 0 failed\n")
    assert recorded.run("--changed", "--record").returncode == 0
    assert ran(recorded) == ["page_2"]
    assert recorded.run("--changed").stdout == "every page is as in its record\n0 passed, 0 failed\n"


def test_only_what_passed_is_published_and_what_is_gone_is_removed(docs) -> None:
    docs.add("lesson", "x = 1")
    docs.add("other", "x = 1")
    docs.run("--all")
    assert docs.published.read() == []
    docs.run("--all", "--record")
    assert [(old["page"], old["lang"]) for old in docs.published.read()] == [
        ("lesson", "en"), ("other", "en"), ("lesson", "zh-Hans"), ("other", "zh-Hans")
    ]  # fmt: skip
    docs.add("lesson", "x = 1\nraise ValueError")
    for language in ("en", "zh-Hans"):
        (docs.source / language / "other.md").unlink()
    docs.run("--all", "--record")
    assert [(old["page"], old["status"]) for old in docs.published.read()] == [("lesson", "PASS"), ("lesson", "SAME")]
    assert docs.records.find("cpu", "en", "lesson")["status"] == "FAIL"


def test_check_names_the_records_that_hold_no_more(recorded, capsys) -> None:
    assert recorded.main("--check") == 0
    assert "hold" not in capsys.readouterr().out
    for name in ("page_0", "page_1"):
        recorded.add(name, f"print('{name}')\nx = 1\ny = 3")
    for language in ("en", "zh-Hans"):
        recorded.published.write({**recorded.published.find("cpu", language, "page_2"), "inputs": "of before"})
    assert recorded.main("--check", "page_0", "page_2", "page_3") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        "verified: 2 of 6 records hold; `docs_test.py NAME --record` renews one, and `--record` all"
    )
    assert lines[1:] == [
        "  its code, or what it imports changed since the run of page_0",
        "  the harness, constraints.txt, or code in C++ or CUDA changed since the run of page_2",
    ]
    assert last == "3 pages checked, 0 findings"
