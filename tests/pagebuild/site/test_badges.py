"""A badge is green for what ran, passed, and would come out the same now: nothing else."""

import json
from pathlib import Path

import pytest

from pagebuild.runs import released_runs, shown_run
from pagebuild.site.badges import read_results
from pagebuild.site.edition import BrokenInputError

pytestmark = pytest.mark.slow

FACTS = ("date", "commit", "processor", "backend", "world", "seconds")
LESSON = "docs/source/{}/basics/lesson.md"


def states(docs, *entries: dict, language: str = "en") -> dict[str, str]:
    docs.results(*entries)
    return {badge["device"]: badge["state"] for badge in docs.badges(language=language)}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_what_passed_is_verified_with_its_facts(docs) -> None:
    record = docs.record()
    docs.results(record)
    assert docs.badges() == [{"device": "cpu", "state": "verified"} | {name: record[name] for name in FACTS}]


def test_devices_are_kept_apart(docs) -> None:
    on_gpu = docs.record(device="cuda", backend="nccl")
    assert states(docs, on_gpu) == {"cuda": "verified"}
    assert states(docs, docs.record(status="FAIL"), on_gpu) == {"cpu": "failed", "cuda": "verified"}


def test_the_pretend_device_has_a_badge_of_its_own_and_shows_no_outputs(docs) -> None:
    assert states(docs, docs.record(device="pretend", backend="pretend")) == {"pretend": "verified"}
    assert shown_run(docs.page(), docs.coverage().results.find_run) is None


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "verified"),
        ({"status": "FAIL"}, "failed"),
        ({"status": "FAIL", "fingerprint": "older"}, "failed"),
        ({"page": "basics/other"}, None),
        ({"lang": "zh-Hans"}, None),
        ({"status": "SKIP"}, None),
        ({"status": "pass"}, None),
        ({"status": "SAME"}, None),
        ({"fingerprint": "older"}, "outdated"),
        ({"fingerprint": ""}, "outdated"),
        ({"inputs": "older"}, "outdated"),
        ({"versions": {"python": "3.9.1", "torch": "1.0.0"}}, "outdated"),
        ({"blocks": []}, "outdated"),
        ({"blocks": [{"printed": "1\n", "figures": ["gone.svg"]}, {"printed": "", "figures": []}]}, "outdated"),
    ],
)
def test_nothing_else_is_green(docs, changes, state) -> None:
    assert states(docs, docs.record(**changes)) == ({"cpu": state} if state else {})


@pytest.mark.parametrize("name", ["csrc/adam.cpp", "constraints.txt", "doctest/pagetest/run/runner.py"])
def test_a_change_of_what_all_pages_depend_on_makes_them_grey(docs, name) -> None:
    docs.write(name, "before")
    assert states(docs, docs.record()) == {"cpu": "verified"}
    docs.write(name, "after")
    assert docs.badges()[0]["state"] == "outdated"


def test_a_change_of_the_code_makes_grey_and_one_of_the_words_does_not(docs) -> None:
    page = docs.root / LESSON.format("en")
    docs.results(docs.record())
    edit(page, "The first sentence.", "It was rewritten.")
    assert docs.badges()[0]["state"] == "verified"
    edit(page, "x = 1", "x = 2")
    assert docs.badges()[0]["state"] == "outdated"


def test_an_output_that_says_something_else_than_was_printed_makes_grey(docs) -> None:
    page = docs.root / LESSON.format("en")
    docs.results(docs.record())
    edit(page, "print(x)\n```\n", "print(x)\n```\n\n```text output\n2\n```\n")
    assert docs.badges()[0]["state"] == "outdated"


@pytest.mark.parametrize(
    ("own", "original", "state"),
    [
        ({}, {}, "verified"),
        (None, {}, "verified"),
        ({}, None, None),
        ({}, {"status": "FAIL"}, "failed"),
        ({"status": "FAIL"}, {}, "failed"),
        ({}, {"status": "SAME"}, None),
        ({}, {"fingerprint": "older"}, "outdated"),
        ({}, {"device": "cuda"}, None),
    ],
)
def test_a_translation_with_the_same_code_stands_and_falls_with_its_original(docs, own, original, state) -> None:
    entries = [] if own is None else [docs.same() | own]
    entries += [] if original is None else [docs.record(**original)]
    assert states(docs, *entries, language="zh-Hans").get("cpu") == state


def test_a_translation_whose_code_is_another_now_is_grey(docs) -> None:
    docs.results(docs.record(), docs.same())
    edit(docs.root / LESSON.format("zh-Hans"), "x = 1", "x = 2")
    assert docs.badges(language="zh-Hans")[0]["state"] == "outdated"
    assert docs.badges()[0]["state"] == "verified"


def test_a_page_without_code_and_one_that_never_ran_have_no_badge(docs) -> None:
    assert docs.badges("talk") == docs.badges() == []


def test_results_of_other_machines_count_and_the_newer_one_wins(docs) -> None:
    docs.results(docs.record(device="cuda", date="2026-10-01"), folder="docs/verified")
    assert states(docs, docs.record()) == {"cpu": "verified", "cuda": "verified"}
    for date, state in (("2026-11-18", "verified"), ("2026-11-19", "verified"), ("2026-11-20", "failed")):
        docs.results(docs.record(status="FAIL", date=date), folder="docs/verified")
        assert docs.badges()[0]["state"] == state, date


def test_a_committed_record_that_holds_is_green_beside_a_newer_run_of_other_code(docs) -> None:
    docs.results(docs.record(date="2026-11-01"), folder="docs/verified")
    docs.results(docs.record(fingerprint="of another branch"))
    assert [(badge["state"], badge["date"]) for badge in docs.badges()] == [("verified", "2026-11-01")]


def test_an_uncommitted_state_is_shown_as_one(docs) -> None:
    docs.results(docs.record(commit="a" * 40 + "-dirty"))
    assert docs.badges()[0]["commit"] == "a" * 40 + "-dirty"


KEYS = {"page": "basics/lesson", "lang": "en", "status": "PASS", "device": "cpu"}


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"page": "basics/lesson", "lang": "en"}', json.dumps(KEYS | {"device": 7}),
     json.dumps(KEYS | {"page": "other"})],
)  # fmt: skip
def test_a_damaged_file_is_an_error_and_not_a_page_without_results(docs, content) -> None:
    docs.write("build/docs/verified/cpu/en/basics/lesson.json", content)
    with pytest.raises(BrokenInputError, match=r"basics/lesson\.json:1: this should hold the record of a run"):
        docs.coverage()


def test_a_released_version_keeps_its_proof(docs) -> None:
    docs.results(docs.record(fingerprint="of its time"), folder="frozen")
    results = read_results([docs.root / "frozen"], released_runs(docs.root / "frozen"))
    assert [badge["state"] for badge in results.badges(docs.page())] == ["verified"]
    assert results.badges(docs.page(language="zh-Hans")) == []
