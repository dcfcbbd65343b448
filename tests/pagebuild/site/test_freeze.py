"""A released version is frozen once, when every page is proved."""

import json
import shutil
from typing import Any

import pytest

from pagebuild.site import freeze
from pagebuild.site.coverage import Coverage
from pagebuild.site.edition import BrokenInputError
from pagebuild.site.freeze import DocumentationFreezer
from pagetest.results.records import Records

pytestmark = pytest.mark.slow

DIRTY = "a" * 40 + "-dirty"


def freezer(docs, *stale: str) -> DocumentationFreezer:
    results = docs.coverage().results
    return DocumentationFreezer(
        docs.root, Coverage(results, lambda _: "", lambda page: stale if page.language == "zh-Hans" else ())
    )


@pytest.fixture
def proved(docs) -> Any:
    """A project whose pages have all run."""
    docs.write("src/pack/__init__.py", "class Thing: ...\n\n\ndef go(): ...\n\n\n__all__ = ['Thing', 'go']\n")
    docs.results(docs.record(warnings=[]), docs.same(warnings=[]))
    return docs


def tree(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_everything_that_a_version_consists_of_is_kept(proved) -> None:
    proved.write("docs/source/en/.cache/x.md", "junk")
    folder = freezer(proved).freeze("0.1.0")
    pages = {
        f"{lang}/{name}" for lang in ("en", "zh-Hans") for name in ("basics/lesson.md", "talk.md", "images/figure.svg")
    }
    files = {"zh-Hans/sidebar_category_translation.json", "sidebars.json", "api.json"}
    records = {f"verified/cpu/{lang}/basics/lesson.json" for lang in ("en", "zh-Hans")}
    assert tree(folder) == pages | files | records
    assert folder == proved.root / "docs/versioned/0.1.0"
    assert (folder / "en/talk.md").read_bytes() == (proved.root / "docs/source/en/talk.md").read_bytes()
    kept = proved.record()
    assert Records(folder / "verified").read() == [kept, kept | {"lang": "zh-Hans"}]
    assert json.loads((proved.root / "docs/versions.json").read_text()) == ["current", "0.1.0"]
    assert [path.name for path in (proved.root / "docs/versioned").iterdir()] == ["0.1.0"]


def test_the_newest_version_comes_first_and_the_website_has_them_all(proved, make) -> None:
    freezer(proved).freeze("0.1.0")
    api = json.loads((proved.root / "build/docs/api.json").read_text())
    proved.write("build/docs/api.json", api | {"version": "0.2.0"})
    freezer(proved).freeze("0.2.0")
    files = make()
    assert json.loads(files["versions.json"]) == ["0.2.0", "0.1.0"]
    for version in ("0.1.0", "0.2.0"):
        front = json.loads(files[f"versioned_docs/version-{version}/basics/lesson.md"].decode().split("\n")[1])
        assert front["page"]["badges"][0]["state"] == "verified"
        assert json.loads(files[f"data/versions/{version}/api.json"])["version"] == version


def test_a_release_shows_what_was_printed_when_it_was_frozen(proved, make) -> None:
    for language in ("en", "zh-Hans"):
        page = proved.root / f"docs/source/{language}/basics/lesson.md"
        shown = page.read_text(encoding="utf-8").replace(
            "print(x)\n```\n", "print(x)\n```\n\n```text output\n...1\n```\n"
        )
        page.write_text(shown, encoding="utf-8")
    proved.results(proved.record(blocks=[{"printed": "0.1\n", "figures": []}, {"printed": "", "figures": []}]))
    freezer(proved).freeze("0.1.0")
    proved.write(
        "build/docs/api.json", json.loads((proved.root / "build/docs/api.json").read_text()) | {"version": "0.2"}
    )
    proved.results(proved.record(fingerprint="older"))
    files = make()
    pages = ("versioned_docs/version-0.1.0", "i18n/zh-Hans/docusaurus-plugin-content-docs/version-0.1.0", "docs")
    fronts = [json.loads(files[f"{page}/basics/lesson.md"].decode().split("\n")[1])["page"] for page in pages]
    assert [list(front.get("recorded", {"outputs": {}})["outputs"].values()) for front in fronts] == [
        ["0.1"],
        ["0.1"],
        [],
    ]


def refused(docs, version: str = "0.1.0", *stale: str) -> str:
    before = (docs.root / "docs/versions.json").read_text()
    with pytest.raises(BrokenInputError) as caught:
        freezer(docs, *stale).freeze(version)
    assert (docs.root / "docs/versions.json").read_text() == before
    return str(caught.value)


def test_a_frozen_version_is_never_overwritten(proved) -> None:
    folder = freezer(proved).freeze("0.1.0")
    before = tree(folder)
    assert "0.1.0:1: 0.1.0 is frozen already" in refused(proved)
    assert tree(folder) == before
    proved.write("docs/versions.json", ["current"])
    assert "is frozen already" in refused(proved)


@pytest.mark.parametrize("version", ["current", "v0.1.0", "1", "../0.1.0", "0.1.0-dev", ""])
def test_a_version_is_numbers_with_dots(proved, version) -> None:
    assert f"versions.json:1: `{version}` is no version such as 0.1.0" in refused(proved, version)


def test_the_reference_is_of_the_version(proved) -> None:
    message = "api.json:1: this is the reference of 0.1.0, not of 0.2.0: set the version"
    assert message in refused(proved, "0.2.0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "the page is not verified (never run)"),
        ({"status": "FAIL"}, "the page is not verified (failed)"),
        ({"fingerprint": "older"}, "the page is not verified (outdated)"),
        ({"inputs": "older"}, "the page is not verified (outdated)"),
        ({"device": "cuda"}, "the page is not verified (never run)"),
        ({"commit": DIRTY}, "the page ran with changes"),
        ({"commit": ""}, "the page ran with changes"),
    ],
)
def test_a_page_that_is_not_proved_forbids_it(proved, changes, message) -> None:
    shutil.rmtree(proved.root / "build/docs/verified")
    proved.results(*([] if changes is None else [proved.record(**changes), proved.same()]))
    found = refused(proved)
    for language in ("en", "zh-Hans"):
        assert f"{language}/basics/lesson.md:1: {message}" in found


def test_a_release_keeps_no_run_that_did_not_hold(proved) -> None:
    proved.results(proved.record(device="cuda", fingerprint="older"))
    folder = freezer(proved).freeze("0.1.0")
    assert {record["device"] for record in Records(folder / "verified").read()} == {"cpu"}


def test_a_stale_translation_forbids_it(proved) -> None:
    assert 'zh-Hans/talk.md:1: the section "更多" is older than its original' in refused(proved, "0.1.0", "更多")


def test_a_finding_of_the_static_rules_forbids_it(proved) -> None:
    proved.write("docs/sidebars.json", {"tutorialSidebar": ["basics/lesson"]})
    assert "sidebars.json:1: no sidebar lists the page `talk`" in refused(proved)


def test_the_subcommand_says_what_it_did(proved, capsys, monkeypatch) -> None:
    monkeypatch.setattr(freeze, "current_coverage", lambda _: freezer(proved).coverage)

    class Options:
        version = "0.1.0"

    assert freeze.run(Options(), proved.root) == 0  # type: ignore[arg-type]
    assert "versioned/0.1.0: commit it with docs/versions.json" in capsys.readouterr().out
    assert freeze.run(Options(), proved.root) == 1  # type: ignore[arg-type]
    assert "1 finding; nothing was frozen" in capsys.readouterr().out
