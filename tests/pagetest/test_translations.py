# pyright: reportArgumentType=false, reportCallIssue=false
"""A translation knows which sections of its original have changed since they were translated."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagetest.checks.translations import stale_sections
from pagetest.model.sections import sections
from pagetest.model.tree import Tree

ENGLISH = """Before.

# Title

Words of
the title.

## First

One `code` word, a [link](x.md) and a | table |.

```python
x = 1  # comment
```

```bash
ls
```

### Part

Part.

```python
print(x)
```

```text output
1
```

## Second

> ```python
> y = 2
> ```

Two.

<!-- doc-test-command: python lesson.py -->
"""
CHINESE = "之前。\n\n# 标题\n\n字。\n\n## 第一节\n\n一。\n\n### 部分\n\n部分。\n\n## 第二节\n\n二。\n"


def hashes(parse, text: str) -> list[str]:
    return [section.hash for section in sections(parse(text))]


def changed(parse, *change: str) -> list[str]:
    assert change[0] in ENGLISH
    before, after = sections(parse(ENGLISH)), hashes(parse, ENGLISH.replace(*change))
    return [section.heading for section, other in zip(before, after, strict=True) if section.hash != other]


def test_a_page_has_a_section_per_heading(parse) -> None:
    found = [(section.slug, section.heading, section.level, section.line) for section in sections(parse(ENGLISH))]
    assert found == [
        ("", "", 0, 1),
        ("title", "Title", 1, 3),
        ("first", "First", 2, 8),
        ("part", "Part", 3, 20),
        ("second", "Second", 2, 32),
    ]
    assert [section.line for section in sections(parse("# Title\n"))] == [1]
    assert sections(parse("")) == ()


@pytest.mark.parametrize(
    ("old", "new", "headings"),
    [
        ("Before.", "Before it.", [""]),
        ("Words of", "The words of", ["Title"]),
        ("## First", "## The first", ["First"]),
        ("`code`", "`other`", ["First"]),
        ("(x.md)", "(y.md)", ["First"]),
        ("| table |", "| tables |", ["First"]),
        ("ls", "ls -l", ["First"]),
        ("Part.", "A part.", ["Part"]),
        ("Two.", "Two and three.", ["Second"]),
        ("Words of\nthe title.", "Words  of the\ntitle.", []),
        ("x = 1  # comment", "x = 2", []),
        ("> y = 2", "> y = 3\n> z = 4", []),
        ("output\n1", "output\n2\n3", []),
        ("python lesson.py", "torchrun --standalone lesson.py", []),
        ("\n## Second", "\n\n\n## Second", []),
    ],
)
def test_a_change_of_prose_touches_its_section_only(parse, old, new, headings) -> None:
    assert changed(parse, old, new) == headings


@pytest.fixture
def lesson(docs) -> Any:
    docs.write("part/lesson", ENGLISH, "en")
    docs.write("part/lesson", CHINESE, "zh-Hans")
    return docs


def edit(docs, old: str, new: str, language: str = "en") -> None:
    path: Path = docs.source / language / "part/lesson.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_new_page_is_stale_as_a_whole_until_it_is_acknowledged(lesson, capsys) -> None:
    assert lesson.main("--translations") == 1
    out = capsys.readouterr().out
    zh, en = lesson.source / "zh-Hans/part/lesson.md", lesson.source / "en/part/lesson.md"
    assert f'{zh}:7: section "第一节" is older than {en}:8: translate what changed, then --ack\n' in out
    assert out.count("is older than") == 5
    assert lesson.main("--ack", "lesson") == 0
    assert capsys.readouterr().out == "1 translation acknowledged, 0 refused\n"
    assert lesson.main("--translations", "lesson") == 0
    assert capsys.readouterr().out == "1 page, 0 findings\n"


def test_the_stamps_are_sorted_one_in_a_line_and_stay_as_they_are(lesson, capsys) -> None:
    lesson.write("a", "# A\n\n## B\n", "en")
    lesson.write("a", "# 甲\n\n## 乙\n", "zh-Hans")
    lesson.main("--ack")
    file = lesson.source / "zh-Hans/translations.json"
    content = json.loads(file.read_text())
    keys = ["a#a", "a#b", "part/lesson#", "part/lesson#first", "part/lesson#part", "part/lesson#second"]
    assert list(content) == [*keys, "part/lesson#title"]
    assert len(file.read_text().splitlines()) == 2 + len(content)
    assert all(len(digest) == 12 for digest in content.values())
    before = file.stat().st_mtime_ns
    assert lesson.main("--ack") == 0
    assert file.stat().st_mtime_ns == before
    assert "2 translations acknowledged" in capsys.readouterr().out


def test_only_the_changed_section_is_stale_and_check_does_not_fail(lesson, capsys) -> None:
    lesson.main("--ack")
    edit(lesson, "Part.", "A part.")
    edit(lesson, "x = 1", "x = 3")
    capsys.readouterr()
    assert lesson.main("--translations") == 1
    zh, en = lesson.source / "zh-Hans/part/lesson.md", lesson.source / "en/part/lesson.md"
    stale = f'{zh}:11: section "部分" is older than {en}:20: translate what changed, then --ack\n'
    assert capsys.readouterr().out == f"{stale}1 page, 1 finding\n"
    assert stale_sections(Tree(lesson.source), "part/lesson") == [("Part", "部分", 11)]
    lesson.main("--check")
    assert "is older than" not in capsys.readouterr().out


def test_sections_may_move_come_and_go(lesson) -> None:
    def stale() -> list[str]:
        return [heading for heading, _, _ in stale_sections(Tree(lesson.source), "part/lesson")]

    lesson.main("--ack")
    body = "Two.\n"
    edit(lesson, body, body + "\n## Third\n\nThree.\n")
    assert stale() == ["Third"]
    edit(lesson, "二。", "二。\n\n## 第三节\n\n三。", "zh-Hans")
    assert stale() == ["Third"]
    assert lesson.main("--ack") == 0
    assert stale() == []
    edit(lesson, "## Third\n\nThree.\n", "")
    edit(lesson, "## First", "## Third\n\nThree.\n\n## First")
    assert stale() == []
    edit(lesson, "## Third\n\nThree.\n\n", "")
    edit(lesson, "## 第三节\n\n三。", "", "zh-Hans")
    assert stale() == []
    edit(lesson, "## Second", "## Last")
    assert stale() == ["Last"]


def test_headings_that_differ_are_not_acknowledged(lesson, capsys) -> None:
    lesson.main("--ack")
    before = (lesson.source / "zh-Hans/translations.json").read_text()
    edit(lesson, "### Part", "#### Part")
    edit(lesson, "Two.", "2.")
    capsys.readouterr()
    assert lesson.main("--ack") == 1
    out = capsys.readouterr().out
    zh, en = lesson.source / "zh-Hans/part/lesson.md", lesson.source / "en/part/lesson.md"
    assert f"{zh}:11: from here on the headings differ from {en}:20: give both pages the same\n" in out
    assert out.endswith("0 translations acknowledged, 1 refused\n")
    assert (lesson.source / "zh-Hans/translations.json").read_text() == before
    assert lesson.main("--translations") == 1
    assert {line.split(": ")[0] for line in capsys.readouterr().out.splitlines()[:-1]} == {f"{zh}:11", f"{zh}:15"}


def test_a_missing_page_is_not_acknowledged(lesson, capsys) -> None:
    (lesson.source / "zh-Hans/part/lesson.md").unlink()
    assert lesson.main("--translations") == lesson.main("--ack") == 1
    assert capsys.readouterr().out.count("lesson.md:1: this page exists in another language only: write it") == 2
    assert stale_sections(Tree(lesson.source), "part/lesson") == []


def test_one_page_is_acknowledged_without_the_others(lesson) -> None:
    lesson.write("a", "# A\n", "en")
    lesson.write("a", "# 甲\n", "zh-Hans")
    lesson.main("--ack", "a")
    assert stale_sections(Tree(lesson.source), "a") == []
    assert len(stale_sections(Tree(lesson.source), "part/lesson")) == 5


BAD_STAMPS = {
    "no json": ("{\n", 2, "this is no JSON"),
    "a list": ("[]", 1, "this is not of the form"),
    "numbers": ('{"part/lesson#": 3}', 1, "this is not of the form"),
    "a page that is gone": ('{\n "gone#a": "1"\n}\n', 2, "there is no page `gone` any more"),
    "another order": ('{\n "part/lesson#b": "1",\n "part/lesson#a": "1"\n}\n', 1, "the hashes are not sorted"),
}


@pytest.mark.parametrize(("text", "line", "message"), BAD_STAMPS.values(), ids=BAD_STAMPS)
def test_check_finds_what_is_wrong_with_the_stamps(lesson, capsys, text, line, message) -> None:
    file = lesson.source / "zh-Hans/translations.json"
    file.write_text(text)
    assert lesson.main("--check") == 1
    assert f"{file}:{line}: {message}" in capsys.readouterr().out
    if "not" in message:
        assert lesson.main("--translations") in {1, 2}


def test_a_broken_file_of_stamps_is_left_as_it_is(lesson, capsys) -> None:
    file = lesson.source / "zh-Hans/translations.json"
    file.write_text("[]")
    assert lesson.main("--ack") == 2
    assert "translations.json:1: this is not of the form" in capsys.readouterr().err
    assert file.read_text() == "[]"
