"""The generated files: pages of both languages, sidebars, labels, versions, reference, downloads."""

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from pagebuild.site.downloads import notebook_origin
from pagebuild.site.edition import BrokenInputError, current_edition
from pagebuild.site.pages import EditionWriter
from pagebuild.site.project import Project

pytestmark = pytest.mark.slow

Damage = Callable[[Any], object]

BASICS = "sidebar.tutorialSidebar.category.Basics"
ZH = "i18n/zh-Hans/docusaurus-plugin-content-docs"


def front(content: bytes) -> dict:
    first, line, last, *_ = content.decode().split("\n")
    assert (first, last) == ("---", "---")
    return json.loads(line)


def test_a_page_is_three_lines_and_then_the_authors_file(docs, make) -> None:
    files = make()
    for folder, language in (("docs", "en"), (f"{ZH}/current", "zh-Hans")):
        author = (docs.root / f"docs/source/{language}/basics/lesson.md").read_text(encoding="utf-8")
        lines = files[f"{folder}/basics/lesson.md"].decode().split("\n")
        assert lines[3:] == author.split("\n")


def test_the_front_matter_says_what_the_site_shows(docs, make) -> None:
    record = docs.record()
    docs.results(record)
    files = make()
    facts = ("device", "date", "commit", "processor", "backend", "world", "seconds")
    badge = {"state": "verified"} | {name: record[name] for name in facts}
    assert front(files["docs/basics/lesson.md"]) == {
        "description": "The first sentence.",
        "custom_edit_url": "https://host.example/team/colossal/edit/main/docs/source/en/basics/lesson.md",
        "page": {
            "name": "basics/lesson",
            "lang": "en",
            "source": "docs/source/en/basics/lesson.md",
            "badges": [badge],
            "downloads": {"script": "/downloads/en/basics/lesson.py"},
            "stale": [],
            "kind": "tutorial",
            "headings": {"4": "a-lesson", "13": "more"},
        },
    }
    chinese = front(files[f"{ZH}/current/basics/lesson.md"])
    assert chinese["description"] == "第一句话。"
    assert chinese["page"]["stale"] == ["更多"]
    assert chinese["page"]["badges"] == [badge]
    assert chinese["page"]["headings"] == {"4": "a-lesson", "14": "more"}
    assert "about" not in chinese["page"]


ABOUT = (
    "---\nkind: how-to\noutcome: Train with `f` in e.g. 5 lines.\nminutes: 10\ndevices: cpu, cuda\n---\n# L\n\nText.\n"
)


def test_what_the_author_says_about_the_page_is_told_and_keeps_its_lines(docs, make) -> None:
    docs.write("docs/source/en/basics/lesson.md", ABOUT)
    docs.write("docs/source/zh-Hans/basics/lesson.md", "# 一课\n")
    content = make()["docs/basics/lesson.md"]
    words = front(content)
    assert words["description"] == "Train with f in e.g. 5 lines."
    outcome = "Train with `f` in e.g. 5 lines."
    assert words["page"]["about"] == {
        "kind": "how-to", "outcome": outcome, "minutes": 10, "devices": ["cpu", "cuda"]
    }  # fmt: skip
    assert words["page"]["headings"] == {"10": "l"}
    assert content.decode().split("\n")[3:] == [*[""] * 6, *ABOUT.split("\n")[6:]]


def test_links_lead_to_the_anchors_that_the_languages_share(docs, make) -> None:
    links = "[a](#更多), [b](../talk.md#谈话), [c](../talk.md#%E8%B0%88%E8%AF%9D), [d](../talk.md), [e](../no.md#x), "
    links += "[f](https://host.example/talk.md#谈话), [g](../images/figure.svg#谈话)"
    docs.write("docs/source/zh-Hans/talk.md", "# 谈话\n\n<!-- doc-test-command: none -->\n")
    extend("docs/source/zh-Hans/basics/lesson.md", f"\n{links}\n")(docs)
    files = make()
    shared = {"#更多": "#more", "../talk.md#谈话": "../talk.md#talk"}
    assert front(files[f"{ZH}/current/basics/lesson.md"])["page"]["links"] == shared
    assert "links" not in front(files["docs/basics/lesson.md"])["page"]


def test_headings_that_differ_in_number_keep_their_own_ids(docs, make) -> None:
    docs.write("docs/source/zh-Hans/basics/lesson.md", "# 一课\n\n## 更多\n\n## 更多\n")
    headings = front(make()[f"{ZH}/current/basics/lesson.md"])["page"]["headings"]
    assert headings == {"4": "一课", "6": "更多", "8": "更多-1"}


OPEN = "# L\n\nText.\n\n```python\nprint(x)\n```\n\n```text output\nx = ...\n```\n"
OPEN += "\n```python\ny = 1\n```\n\n<!-- doc-test-command: python lesson.py -->\n"


def test_what_was_printed_stands_where_the_author_left_it_open(docs, make) -> None:
    for language in ("en", "zh-Hans"):
        docs.write(f"docs/source/{language}/basics/lesson.md", OPEN)
    printed = [{"printed": "\nx = \x7f2.5  \n\n", "figures": []}, {"printed": "", "figures": []}]
    docs.results(docs.record(blocks=printed), docs.same())
    for folder in ("docs", f"{ZH}/current"):
        page = make()[f"{folder}/basics/lesson.md"]
        assert page.decode().split("\n")[3:] == OPEN.split("\n")
        assert "\x7f" not in page.decode()
        line = page.decode().split("\n").index("```text output") + 1
        recorded = {"date": "2026-11-19", "machine": "A processor", "outputs": {str(line): "x = \x7f2.5"}}
        assert front(page)["page"]["recorded"] == recorded


def test_without_a_run_that_holds_the_output_is_the_authors(docs, make) -> None:
    docs.write("docs/source/en/basics/lesson.md", OPEN)
    docs.results(docs.record(blocks=[{"printed": "x = 2.5", "figures": []}] * 2, fingerprint="older"))
    files = make()
    page = front(files["docs/basics/lesson.md"])["page"]
    assert page["badges"][0]["state"] == "outdated"
    assert "recorded" not in page
    assert "recorded" not in front(files["docs/talk.md"])["page"]


def test_without_an_address_of_the_repository_no_page_can_be_edited(docs) -> None:
    files = EditionWriter(
        docs.root, Project("", "c", "2026-11-20"), current_edition(docs.root), docs.coverage()
    ).files()
    pages = [front(content) for name, content in files.items() if name.endswith(".md")]
    assert len(pages) == 8
    assert {page["custom_edit_url"] for page in pages} == {None}


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("# T\n\n{{ autodoc:pack.Thing }}\n\nAfter the hook.\n", "After the hook."),
        (
            "# T\n\n![A figure](../images/figure.svg)\n\nWords, e.g. these and\nthose. More.\n",
            "Words, e.g. these and those.",
        ),
        ("# T\n\n> A quote.\n\n- a list\n", "T"),
        ('# T\n\nNo end\u2028 "quoted" {x}: y\n', 'No end\u2028 "quoted" {x}: y'),
        ("# T\n\n**Bold** and [a link](talk.md), $x^2$. Next.\n", "Bold and a link, $x^2$."),
    ],
)
def test_the_description_is_the_first_sentence_of_prose(docs, make, text, description) -> None:
    docs.write("docs/source/en/basics/lesson.md", text)
    content = make()["docs/basics/lesson.md"]
    assert front(content)["description"] == description
    assert "\u2028" not in content.decode().split("\n---\n")[0]


def test_images_lie_beside_the_pages_of_their_language(docs, make) -> None:
    docs.write("docs/source/en/.cache/junk.svg", "junk")
    files = make()
    assert files["docs/images/figure.svg"] == b"<svg>en</svg>"
    assert files[f"{ZH}/current/images/figure.svg"] == b"<svg>zh-Hans</svg>"
    assert not any("junk" in name for name in files)


def test_a_figure_that_the_page_draws_has_the_labels_of_the_language(docs, make) -> None:
    docs.write("docs/source/en/images/curve.svg", "<svg><text>loss</text></svg>")
    docs.write("docs/source/zh-Hans/figures.json", '{"loss": "损失"}')
    extend("docs/source/zh-Hans/basics/lesson.md", "\n![曲线](../../en/images/curve.svg)\n")(docs)
    files = make()
    assert files["docs/images/curve.svg"] == b"<svg><text>loss</text></svg>"
    assert files[f"{ZH}/current/images/curve.svg"].decode() == "<svg><text>损失</text></svg>"
    assert "![曲线](../images/curve.svg)" in files[f"{ZH}/current/basics/lesson.md"].decode()


def test_the_script_is_the_program_with_the_headings_of_the_page(make) -> None:
    files = make()
    text = files["static/downloads/en/basics/lesson.py"].decode()
    head, *_ = text.split("\n\n")
    assert head.split("\n") == [
        "# The program of docs/source/en/basics/lesson.md, colossal 0.1.0.",
        "# Run it: torchrun --standalone --nproc_per_node=2 lesson.py",
    ]
    assert text.index("print(x)") < text.index("# --- More ---") < text.index("mesh = launch()")
    compile(text, "lesson.py", "exec")
    assert "static/downloads/en/talk.py" not in files


SHELL = """# T

## Write it

```python file=sub/train.py
print("$trained", 1)
END
```

```shell run
NAME=x
python sub/train.py | head -1
```

## Run it

```shell run
echo $NAME
```

<!-- doc-test-command: none -->
"""


def test_what_a_page_does_in_a_shell_is_a_script_for_the_shell(docs, make, tmp_path) -> None:
    page = SHELL.replace("END", "END = 1\n'''\nEND\n'''")
    docs.write("docs/source/en/basics/lesson.md", page)
    files = make()
    assert front(files["docs/basics/lesson.md"])["page"]["downloads"] == {"shell": "/downloads/en/basics/lesson.sh"}
    assert "static/downloads/en/basics/lesson.py" not in files
    text = files["static/downloads/en/basics/lesson.sh"].decode()
    assert text.index("# --- Write it ---") < text.index("NAME=x") < text.index("# --- Run it ---")
    done = subprocess.run(["bash"], input=text, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "$trained 1\nx\n"
    block = docs.page().shell[0]
    assert (tmp_path / "sub/train.py").read_text() == block.source


def test_a_page_with_a_program_and_a_shell_offers_both(docs, make) -> None:
    extend(LESSON, "\n```shell run\nls\n```\n")(docs)
    downloads = front(make()["docs/basics/lesson.md"])["page"]["downloads"]
    assert downloads == {"script": "/downloads/en/basics/lesson.py", "shell": "/downloads/en/basics/lesson.sh"}


def test_the_notebook_is_offered_if_it_was_made_from_this_text_and_this_code(docs, make) -> None:
    place = "build/docs/notebooks/en/basics/lesson.ipynb"
    right = notebook_origin(docs.page(), "the present code")
    for wrong in ({}, right | {"text_hash": "another"}, right | {"fingerprint": "older"}, right | {"lang": "zh-Hans"}):
        docs.write(place, {"metadata": {"colossal": wrong}, "cells": []})
        downloads = front(make()["docs/basics/lesson.md"])["page"]["downloads"]
        assert downloads == {"script": "/downloads/en/basics/lesson.py"}
    docs.write(place, {"metadata": {"colossal": right | {"commit": "c"}}, "cells": []})
    files = make()
    assert front(files["docs/basics/lesson.md"])["page"]["downloads"]["notebook"] == "/downloads/en/basics/lesson.ipynb"
    assert files["static/downloads/en/basics/lesson.ipynb"] == (docs.root / place).read_bytes()


def test_the_sidebars_and_their_labels(make) -> None:
    files = make()
    tutorials = [{"type": "category", "label": "Basics", "items": ["basics/lesson", {"type": "doc", "id": "talk"}]}]
    reference = ["api/index", {"type": "category", "label": "Make things", "items": ["api/things"]}]
    assert json.loads(files["sidebars.json"]) == {"tutorialSidebar": tutorials, "apiSidebar": reference}
    assert json.loads(files[f"{ZH}/current.json"]) == {
        "version.label": {"message": "main"},
        "sidebar.tutorialSidebar.category.Basics": {"message": "基础"},
        "sidebar.apiSidebar.category.Make things": {"message": "制造"},
    }
    assert json.loads(files["versions.json"]) == []


def test_the_reference_has_the_pages_of_its_contents(docs, make) -> None:
    files = make()
    for folder, title, opening in (("docs", "Things", "# API\n\nBegin"), (f"{ZH}/current", "物件", "# 接口\n\n[物件]")):
        content = files[f"{folder}/api/things.md"]
        assert content.decode().split("---\n")[2] == (
            f"# {title}\n\nAbout pack: `go`\n\n{{{{ autodoc:pack.Thing }}}}\n\n{{{{ autodoc:pack.go }}}}\n"
        )
        words = front(content)
        assert (words["title"], words["description"], words["page"]["kind"]) == (title, "About pack: `go`", "api")
        assert files[f"{folder}/api/index.md"].decode().split("---\n")[2].startswith(opening)
        assert {name for name in files if name.startswith(f"{folder}/api/")} == {
            f"{folder}/api/{name}.md" for name in ("index", "things")
        }
    assert json.loads(files["data/api.json"]) == json.loads((docs.root / "build/docs/api.json").read_text())


def test_the_site_knows_the_project(make) -> None:
    assert json.loads(make()["data/site.json"]) == {
        "repository": "https://host.example/team/colossal",
        "version": "0.1.0",
        "commit": "c" * 40,
        "date": "2026-11-20",
    }


# ------------------------------------------------------------------------------------------ what is refused


def release(docs, version: str = "0.0.9") -> None:
    """Lays down a frozen version by hand."""
    folder = docs.root / "docs" / "versioned" / version
    shutil.copytree(docs.root / "docs" / "source", folder)
    for name in ("docs/sidebars.json", "build/docs/api.json"):
        shutil.copy(docs.root / name, folder)
    (folder / "verified").mkdir()
    docs.write("docs/versions.json", ["current", version])


def remove(name: str) -> Damage:
    return lambda docs: (docs.root / name).unlink()


def write(name: str, content: object) -> Damage:
    return lambda docs: docs.write(name, content)


def extend(name: str, text: str) -> Damage:
    return lambda docs: docs.write(name, (docs.root / name).read_text(encoding="utf-8") + text)


LESSON = "docs/source/en/basics/lesson.md"
LABELS = "docs/source/zh-Hans/sidebar_category_translation.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("build/docs/api.json"), r"api\.json:1: the file is missing: run `python docs_build\.py api`"),
        (remove("docs/source/zh-Hans/talk.md"), r"zh-Hans/talk\.md:1: the page exists in another language only"),
        (extend(LESSON, "\n{{ autodoc:pack.Thong }}\n"), r"lesson\.md:22: `pack\.Thong` is not in the API reference"),
        (write(LABELS, {}), r"translation\.json:1: no translation of the sidebar's label"),
        (write(LABELS, {BASICS: {"message": "x"}, "y": {"message": "z"}}), r"translation\.json:5: `y` is no label"),
        (remove(LABELS), r"translation\.json:1: the sidebar has the label"),
        (write("docs/sidebars.json", {"a": ["basics/lesson"]}), r"sidebars\.json:1: no sidebar lists the page `talk`"),
        (write("docs/versions.json", ["0.1.0"]), r"versions\.json:1: the list is"),
        (write("docs/versions.json", ["current", "0.1.0", "0.1.0"]), r"versions\.json:1: the list is"),
        (write("docs/versions.json", ["current", "0.1.0"]), r"versioned/0\.1\.0/en:1: .* restore the folder"),
        (write("build/docs/verified/cpu/en/talk.json", "[]"), r"talk\.json:1: this should hold the record of a run"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named_with_file_and_line(docs, make, damage, message) -> None:
    damage(docs)
    with pytest.raises(BrokenInputError, match=message):
        make()


def test_a_page_may_not_stand_where_the_reference_is(docs, make) -> None:
    for language in ("en", "zh-Hans"):
        docs.write(f"docs/source/{language}/api/mine.md", "# Mine\n\n<!-- doc-test-command: none -->\n")
    docs.write("docs/sidebars.json", {"tutorialSidebar": ["basics/lesson", "talk", "api/mine"]})
    docs.write(LABELS, {})
    with pytest.raises(BrokenInputError, match=r"api/mine\.md:1: the folder api/ belongs to the API reference"):
        make()


def test_a_public_name_without_an_entry_is_an_error(docs, make) -> None:
    content = json.loads((docs.root / "build/docs/api.json").read_text())
    del content["objects"]["pack.go"]
    docs.write("build/docs/api.json", content)
    with pytest.raises(BrokenInputError, match=r"api\.json:1: pack\.go is public and not described"):
        make()


# ------------------------------------------------------------------------------------------ versions


def test_a_released_version_has_pages_reference_and_labels_of_its_own(docs, make) -> None:
    release(docs)
    changed = (docs.root / LESSON).read_text(encoding="utf-8").replace("The first sentence.", "It was rewritten.")
    docs.write(LESSON, changed)
    files = make()
    old = files["versioned_docs/version-0.0.9/basics/lesson.md"]
    assert front(old)["description"] == "The first sentence."
    assert front(old)["custom_edit_url"] is None
    assert front(old)["page"]["source"] == "docs/versioned/0.0.9/en/basics/lesson.md"
    assert front(old)["page"]["downloads"] == {"script": "/downloads/0.0.9/en/basics/lesson.py"}
    assert front(files["docs/basics/lesson.md"])["description"] == "It was rewritten."
    assert json.loads(files["versions.json"]) == ["0.0.9"]
    assert json.loads(files[f"{ZH}/version-0.0.9.json"])["version.label"] == {"message": "0.0.9"}
    for name in (
        "static/downloads/0.0.9/zh-Hans/basics/lesson.py",
        "versioned_sidebars/version-0.0.9-sidebars.json",
        "versioned_docs/version-0.0.9/api/things.md",
        "versioned_docs/version-0.0.9/images/figure.svg",
        f"{ZH}/version-0.0.9/basics/lesson.md",
        "data/versions/0.0.9/api.json",
    ):
        assert name in files


def test_a_released_version_is_checked_like_the_present_one(docs, make) -> None:
    release(docs)
    docs.write("docs/versioned/0.0.9/sidebars.json", {"a": ["basics/lesson"]})
    with pytest.raises(BrokenInputError, match=r"0\.0\.9/sidebars\.json:1: no sidebar lists the page `talk`"):
        make()
