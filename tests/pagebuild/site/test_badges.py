"""A badge is green for what ran, passed, and is still what ran: nothing else."""

import json

import pytest

from pagebuild.site.badges import Present, present_of, read_results
from pagebuild.site.edition import BrokenInputError, current_edition

PRESENT = "the present code"
PASSED = {
    "page": "basics/lesson", "lang": "en", "status": "PASS", "device": "cpu", "backend": "gloo", "world": 2,
    "seconds": 8.6, "date": "2026-11-19", "commit": "a" * 40, "fingerprint": PRESENT, "code_hash": "h",
}  # fmt: skip
SAME = PASSED | {"lang": "zh-Hans", "status": "SAME"}
NEVER_ON_A_GPU = {"device": "cuda", "state": "never"}


NOW = Present(PRESENT, PRESENT)


def states(docs, *entries: dict, language: str = "en", present: Present = NOW) -> list[str]:
    docs.results(*entries)
    results = docs.knowledge().results
    return [badge["state"] for badge in results.badges(docs.page(language=language), present)]


def test_what_passed_is_verified_with_its_facts(docs) -> None:
    docs.results(PASSED)
    facts = {"date": "2026-11-19", "commit": "a" * 40, "backend": "gloo", "world": 2, "seconds": 8.6}
    badges = docs.knowledge().results.badges(docs.page(), NOW)
    assert badges == [{"device": "cpu", "state": "verified"} | facts, NEVER_ON_A_GPU]


def test_devices_are_kept_apart(docs) -> None:
    on_gpu = PASSED | {"device": "cuda", "backend": "nccl"}
    assert states(docs, on_gpu) == ["never", "verified"]
    assert states(docs, PASSED | {"status": "FAIL"}, on_gpu) == ["failed", "verified"]


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([], "never"),
        ([PASSED | {"page": "basics/other"}], "never"),
        ([PASSED | {"lang": "zh-Hans"}], "never"),
        ([PASSED | {"status": "FAIL"}], "failed"),
        ([PASSED | {"status": "FAIL", "fingerprint": "older"}], "failed"),
        ([PASSED | {"status": "SKIP"}], "never"),
        ([PASSED | {"status": "pass"}], "never"),
        ([PASSED | {"status": "SAME"}], "never"),
        ([PASSED | {"fingerprint": "older"}], "outdated"),
        ([PASSED | {"fingerprint": ""}], "outdated"),
        ([{key: value for key, value in PASSED.items() if key != "fingerprint"}], "outdated"),
        ([PASSED, PASSED | {"status": "FAIL", "date": "2026-11-20"}], "failed"),
    ],
)
def test_nothing_else_is_green(docs, entries, state) -> None:
    assert states(docs, *entries)[0] == state


def test_an_unknown_present_proves_nothing(docs) -> None:
    assert states(docs, PASSED | {"fingerprint": ""}, present=Present("", ""))[0] == "outdated"


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([PASSED, SAME], "verified"),
        ([SAME], "never"),
        ([PASSED | {"status": "FAIL"}, SAME], "failed"),
        ([PASSED | {"status": "SAME"}, SAME], "never"),
        ([PASSED | {"fingerprint": "older"}, SAME], "outdated"),
        ([PASSED, SAME | {"fingerprint": "older"}], "outdated"),
        ([PASSED | {"device": "cuda"}, SAME], "never"),
    ],
)
def test_a_translation_with_the_same_code_stands_and_falls_with_its_original(docs, entries, state) -> None:
    assert states(docs, *entries, language="zh-Hans")[0] == state


def test_a_translation_whose_code_is_another_now_is_outdated(docs) -> None:
    assert states(docs, PASSED, SAME, language="zh-Hans", present=Present(PRESENT, ""))[0] == "outdated"
    tree = current_edition(docs.root).tree
    both = present_of(docs.page(language="zh-Hans"), tree, lambda page: f"code of {page.language}")
    assert both == Present("code of zh-Hans", "code of en")
    docs.write("docs/source/en/basics/lesson.md", "# T\n\n```python\nx = 2\n```\n")
    assert present_of(docs.page(language="zh-Hans"), tree, lambda _: PRESENT) == Present(PRESENT, "")
    assert present_of(docs.page(), tree, lambda _: PRESENT) == NOW


def test_a_page_without_code_has_nothing_to_prove(docs) -> None:
    badges = docs.knowledge().results.badges(docs.page("talk"), NOW)
    assert badges == [{"device": "cpu", "state": "none"}, {"device": "cuda", "state": "none"}]


def test_a_missing_file_leaves_every_page_unproved(docs) -> None:
    badges = docs.knowledge().results.badges(docs.page(), NOW)
    assert badges == [{"device": "cpu", "state": "never"}, NEVER_ON_A_GPU]
    assert not docs.knowledge().results.has_run_on("cpu")


def test_results_of_other_machines_count_and_the_newer_one_wins(docs) -> None:
    docs.results(PASSED | {"device": "cuda", "date": "2026-10-01"}, folder="docs/verified")
    assert states(docs, PASSED) == ["verified", "verified"]
    docs.results(PASSED | {"status": "FAIL", "date": "2026-11-20"}, folder="docs/verified")
    assert states(docs, PASSED)[0] == "failed"
    docs.results(PASSED | {"status": "FAIL", "date": "2026-11-18"}, folder="docs/verified")
    assert states(docs, PASSED)[0] == "verified"


def test_an_uncommitted_state_is_shown_as_one(docs) -> None:
    docs.results(PASSED | {"commit": "a" * 40 + "-dirty"})
    assert docs.knowledge().results.badges(docs.page(), NOW)[0]["commit"] == "a" * 40 + "-dirty"


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"page": "basics/lesson", "lang": "en"}', json.dumps(PASSED | {"device": 7}),
     json.dumps(PASSED | {"page": "other"})],
)  # fmt: skip
def test_a_damaged_file_is_an_error_and_not_a_page_without_results(docs, content) -> None:
    docs.write("build/docs/verified/cpu/en/basics/lesson.json", content)
    with pytest.raises(BrokenInputError, match=r"basics/lesson\.json:1: this should hold the record of a run"):
        read_results([docs.root / "build/docs/verified"])


def test_a_released_version_keeps_its_proof(docs) -> None:
    docs.results(PASSED, PASSED | {"device": "cuda", "status": "FAIL"}, folder="frozen")
    badges = read_results([docs.root / "frozen"], are_final=True).badges(docs.page(), Present("", ""))
    assert [badge["state"] for badge in badges] == ["verified", "failed"]
