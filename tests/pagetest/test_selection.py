"""What is not run again: pages whose committed record holds, where `.ci/run` asks for it."""

import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pagetest.results.sample import sample

ROOT = Path(__file__).resolve().parents[2]
CHANGED = {**os.environ, "COLOSSAL_CHECK": "changed"}
NAMES = [f"page_{number}" for number in range(8)]
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
    """Eight pages, all of them recorded; the commit chooses six of them to be tried."""
    for name in NAMES:
        docs.add(name, counted(docs, name))
    docs.write("prose", "# Title\n\n<!-- doc-test-command: none -->\n")
    done = docs.run("--record")
    assert done.returncode == 0, done.stdout
    assert ran(docs) == NAMES
    return docs


def test_a_page_whose_record_holds_is_not_run_again_but_for_a_sample(recorded) -> None:
    done = recorded.run("--all", env=CHANGED)
    assert done.returncode == 0, done.stdout
    first = ran(recorded)
    commit = recorded.records.find("cpu", "en", first[0])["commit"]
    assert first == sorted(sample(NAMES, commit, 6))
    assert "2 pages not run: the records in " in done.stdout
    assert "verified hold, and 6 of them were tried\n12 passed, 0 failed\n" in done.stdout
    assert done.stdout.count("NONE  no code") == 2


def test_without_the_variable_everything_runs(recorded) -> None:
    assert recorded.run("--all").returncode == 0
    assert ran(recorded) == NAMES
    assert recorded.run(*NAMES, env=CHANGED).returncode == 0
    assert ran(recorded) == NAMES
    assert recorded.run("--all", env={**os.environ, "COLOSSAL_CHECK": "1"}).returncode == 0
    assert ran(recorded) == NAMES


def test_without_committed_records_everything_runs(docs) -> None:
    for name in NAMES:
        docs.add(name, counted(docs, name))
    for _ in range(2):
        done = docs.run("--all", env=CHANGED)
        assert done.returncode == 0, done.stdout
        assert "not run" not in done.stdout
        assert ran(docs) == NAMES
    assert docs.published.read() == []


def test_what_has_changed_runs_whatever_the_sample(recorded) -> None:
    """The two that are no sample: one has other code, the record of the other one was of another torch."""
    recorded.run("--all", env=CHANGED)
    first, second = sorted(set(NAMES) - set(ran(recorded)))
    recorded.add(first, counted(recorded, first) + "\nz = 3")
    old = recorded.published.find("cpu", "en", second)
    recorded.published.write(old | {"versions": old["versions"] | {"torch": "1.0"}})
    done = recorded.run("--all", env=CHANGED)
    assert {first, second} <= set(ran(recorded))
    assert " 0 pages not run" in f" {done.stdout[done.stdout.index(' pages not run') - 1 :]}"


def test_a_translation_without_a_record_is_no_reason_to_run_its_original(recorded) -> None:
    for name in NAMES:
        (recorded.published.folder / f"cpu/zh-Hans/{name}.json").unlink()
    recorded.run("--all", env=CHANGED)
    assert len(ran(recorded)) == 6


def test_an_output_block_that_says_something_else_makes_its_page_run(docs) -> None:
    shown = "```text output\n{}\n```\n\n<!--"
    for name in NAMES:
        docs.write(name, docs.markdown(name, counted(docs, name)).replace("<!--", shown.format(name)))
    assert docs.run("--all", "--record").returncode == 0
    assert ran(docs) == NAMES
    docs.run("--all", env=CHANGED)
    left = set(NAMES) - set(ran(docs))
    untried = min(left)
    docs.write(untried, docs.markdown(untried, counted(docs, untried)).replace("<!--", shown.format("other")))
    done = docs.run("--all", env=CHANGED)
    assert done.returncode == 1
    assert f"was expected to print `other` here and printed `{untried}`" in done.stdout


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"printed": "", "figures": []},
            r"page_\d.md:5: this block printed `page_\d`, and nothing when it was recorded",
        ),
        ({"printed": "page", "figures": ["a.svg"]}, r"page_\d.md:5: this block drew nothing, and a.svg when it was"),
    ],
)
def test_a_sampled_page_must_reproduce_its_record(recorded, block, message) -> None:
    for name in NAMES:
        old = recorded.published.find("cpu", "en", name)
        recorded.published.write(old | {"blocks": [block]}, dict.fromkeys(block["figures"], b"<svg></svg>"))
    done = recorded.run("--all", env=CHANGED)
    assert done.returncode == 1
    assert len(re.findall(message, done.stdout)) == 6
    assert "2 pages not run" in done.stdout
    assert {recorded.records.find("cpu", "en", name)["status"] for name in ran(recorded)} == {"FAIL"}


def test_a_broken_record_is_named_before_anything_runs(recorded) -> None:
    (recorded.published.folder / "cpu/en/page_3.json").write_text("{")
    done = recorded.run("--all", env=CHANGED)
    assert done.returncode == 2
    assert "page_3.json:1: this should hold the record of a run, but it is no JSON" in done.stderr
    assert ran(recorded) == []


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


def test_only_the_script_of_all_checks_asks_for_it() -> None:
    """And a page that starts the harness itself never inherits it."""
    asking = [path.name for path in (ROOT / ".ci/run", ROOT / "noxfile.py") if "COLOSSAL_CHECK=" in path.read_text()]
    assert asking == ["run"]


def test_pages_know_nothing_of_it(docs) -> None:
    docs.add("lesson", "import os\nassert 'COLOSSAL_CHECK' not in os.environ")
    assert docs.run("lesson", env=CHANGED).returncode == 0


def test_check_names_the_records_that_hold_no_more(recorded, capsys) -> None:
    assert recorded.main("--check") == 0
    assert "hold" not in capsys.readouterr().out
    recorded.add("page_3", "print('page_3')\nx = 1\ny = 3")
    recorded.add("page_4", "print('page_4')\nx = 1\ny = 3")
    for language in ("en", "zh-Hans"):
        recorded.published.write({**recorded.published.find("cpu", language, "page_5"), "inputs": "of before"})
    assert recorded.main("--check", "page_3", "page_5", "page_6") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        "verified: 2 of 6 records hold; `docs_test.py NAME --record` renews one, and `--record` all"
    )
    assert lines[1:] == [
        "  its code, or what it imports changed since the run of page_3",
        "  the harness, constraints.txt, or code in C++ or CUDA changed since the run of page_5",
    ]
    assert last == "3 pages checked, 0 findings"


def test_the_readme_counts_what_the_records_say(docs, capsys) -> None:
    tree = replace(docs, source=docs.source.parent / "docs/source")
    readme = docs.source.parent / "README.md"
    readme.write_text("a\n<!-- doc-test-count -->b<!-- /doc-test-count -->.\n")
    tree.add("page_1", "print(1)\nx = 1\ny = 2")
    tree.add("page_2", "print(1)\nx = 1\nassert x == 2")
    tree.write("prose", "# Title\n\n<!-- doc-test-command: none -->\n")
    assert tree.main("--check") == 1
    assert f"{readme}:2: the records in verified say `2 tutorials, none of them recorded" in capsys.readouterr().out
    assert tree.run("--record").returncode == 1
    today = datetime.now(UTC).date().isoformat()
    said = f"1 of 2 tutorials passed on a CPU, 0 on a GPU (last run {today})"
    assert readme.read_text() == f"a\n<!-- doc-test-count -->{said}<!-- /doc-test-count -->.\n"
    assert tree.main("--check") == 0
