"""Names, languages, the sidebar and the versions."""

import json

import pytest

from pagetest.model.tree import Tree, UnknownPageError


@pytest.fixture
def tree(docs) -> Tree:
    for name in ("basics/booster_api", "basics/run_demo", "features/zero", "features/run_demo"):
        docs.write(name, "# Title\n\n<!-- doc-test-command: none -->\n")
    docs.write("features/only_en", "# Title\n", "en")
    docs.write("_drafts/hidden", "# Title\n")
    return Tree(docs.source)


@pytest.mark.parametrize(
    "wanted",
    [
        "booster_api",
        "booster_api.md",
        "basics/booster_api",
        "en/basics/booster_api.md",
        "docs/source/en/basics/booster_api.md",
        "./docs/source/zh-Hans/basics/booster_api.md",
        "/somewhere/docs/source/en/basics/booster_api.md",
    ],
)
def test_a_page_goes_by_its_stem_and_by_its_path(tree, wanted) -> None:
    assert tree.resolve(wanted) == "basics/booster_api"


def test_pages_of_one_stem_are_kept_apart(tree) -> None:
    with pytest.raises(UnknownPageError, match=r"names 2 pages, give one of: basics/run_demo, features/run_demo"):
        tree.resolve("run_demo")
    assert tree.resolve("features/run_demo") == "features/run_demo"


def test_an_unknown_name_is_answered_with_the_nearest(tree) -> None:
    with pytest.raises(UnknownPageError, match=r"no page is called `boster_api`; the nearest: basics/booster_api"):
        tree.resolve("boster_api")
    with pytest.raises(UnknownPageError, match=r"no page is called `xyz`; --list"):
        tree.resolve("xyz")


def test_part_of_a_stem_is_no_name(tree) -> None:
    with pytest.raises(UnknownPageError):
        tree.resolve("ero")


def test_names_and_languages(tree) -> None:
    assert tree.names == (
        "basics/booster_api",
        "basics/run_demo",
        "features/only_en",
        "features/run_demo",
        "features/zero",
    )
    assert tree.languages("features/only_en") == ("en",)
    assert tree.languages("features/zero") == ("en", "zh-Hans")


SIDEBAR = {
    "tutorials": [
        "basics/booster_api",
        {"type": "category", "label": "Features", "link": {"type": "doc", "id": "features/zero"}, "items": [
            {"type": "doc", "id": "features/run_demo"}, {"type": "link", "label": "x", "href": "https://example.org"},
        ]},
        {"type": "category", "label": "Basics", "items": ["basics/run_demo"]},
    ],
}  # fmt: skip
LABELS = {
    "sidebar.tutorials.category.Features": {"message": "功能"},
    "sidebar.tutorials.link.x": {"message": "某处"},
    "sidebar.tutorials.category.Basics": {"message": "基础"},
}


def write_labels(docs, labels: object) -> None:
    file = docs.source / "zh-Hans" / "sidebar_category_translation.json"
    file.write_text(json.dumps(labels, indent=1, ensure_ascii=False), encoding="utf-8")


@pytest.mark.usefixtures("tree")
def test_the_sidebar_and_the_pages_agree_both_ways(docs, capsys) -> None:
    (docs.source / "en/features/only_en.md").unlink()
    beside = docs.source.parent
    (beside / "sidebars.json").write_text(json.dumps(SIDEBAR))
    (beside / "versions.json").write_text('["0.1.0"]')
    write_labels(docs, LABELS)
    assert docs.main("--check") == 0, capsys.readouterr().out

    changed = json.dumps(SIDEBAR, indent=1).replace("features/zero", "features/nought")
    (beside / "sidebars.json").write_text(changed)
    (beside / "versions.json").write_text('{"a": 1}')
    assert docs.main("--check") == 1
    out = capsys.readouterr().out
    line = next(i for i, text in enumerate(changed.split("\n"), 1) if "nought" in text)
    assert f"sidebars.json:{line}: the sidebar lists `features/nought`, which is no page" in out
    assert "sidebars.json:1: no sidebar lists the page `features/zero`" in out
    assert "versions.json:1: the versions are a JSON list of strings" in out


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, ":1: the sidebar has the label `sidebar.tutorials.category.Features`, and no file translates it"),
        ([], ":1: the labels are a JSON object"),
        (
            {**LABELS, "sidebar.tutorials.category.Gone": {"message": "x"}},
            ":11: `sidebar.tutorials.category.Gone` is no",
        ),
        (
            dict(list(LABELS.items())[1:]),
            ":1: no translation of the sidebar's label `sidebar.tutorials.category.Features`",
        ),
        (
            {**LABELS, "sidebar.tutorials.link.x": {"message": " "}},
            ":5: the label `sidebar.tutorials.link.x` has no text",
        ),
    ],
)
@pytest.mark.usefixtures("tree")
def test_the_labels_of_the_sidebar_are_translated(docs, capsys, labels, message) -> None:
    (docs.source / "en/features/only_en.md").unlink()
    (docs.source.parent / "sidebars.json").write_text(json.dumps(SIDEBAR))
    if labels is not None:
        write_labels(docs, labels)
    assert docs.main("--check") == 1
    assert f"zh-Hans/sidebar_category_translation.json{message}" in capsys.readouterr().out


@pytest.mark.usefixtures("tree")
def test_a_broken_sidebar_is_reported_at_its_line(docs, capsys) -> None:
    (docs.source.parent / "sidebars.json").write_text('{\n"a": [\n}')
    assert docs.main("--check") == 1
    assert "sidebars.json:3: this is no JSON" in capsys.readouterr().out


@pytest.mark.usefixtures("tree")
def test_check_names_the_missing_translation(docs, capsys) -> None:
    assert docs.main("--check", "only_en") == 1
    out = capsys.readouterr().out
    assert "only_en.md:1: every page exists in en and zh-Hans" in out
    assert "zh-Hans" in out.splitlines()[-2]


FRONT = "---\nkind: {}\noutcome: Do it\nminutes: 1\ndevices: cpu\n---\n"


def test_a_category_holds_pages_of_its_kind(docs, capsys) -> None:
    for name, kind in (("memory/zero", "how-to"), ("ideas/ranks", "concept"), ("memory/ledger", "internals")):
        docs.write(name, FRONT.format(kind) + docs.markdown(name, "x = 1"))
    beside = docs.source.parent
    items = {"Memory": ["memory/zero"], "Concepts": ["ideas/ranks"], "More": ["memory/ledger"]}

    def check() -> str:
        content = {"s": [{"type": "category", "label": label, "items": names} for label, names in items.items()]}
        (beside / "sidebars.json").write_text(json.dumps(content))
        docs.main("--check")
        return capsys.readouterr().out

    assert "of the sidebar is the place" not in check()
    docs.write("ideas/ranks", docs.markdown("ideas/ranks", "x = 1"))
    assert "en/ideas/ranks.md:1: a page of this category has front matter: write kind, outcome, " in check()
    items["Memory"].append(items["More"].pop())
    out = check()
    for language in ("en", "zh-Hans"):
        assert (
            f"{language}/memory/ledger.md:2: `Memory` of the sidebar is the place of tutorial and how-to pages, " in out
        )
