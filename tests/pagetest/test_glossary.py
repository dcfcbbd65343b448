"""The glossary: one Chinese word for a term, and a finding for every other."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagetest.checks.glossary import Glossary
from pagetest.model.reader import parse_page

ROOT = Path(__file__).resolve().parents[2]

TERMS = {
    "all-reduce": {"zh": ["all-reduce"], "not": ["全归约", "AllReduce", "all reduce"]},
    "memory fragmentation": {"zh": ["内存碎片"]},
    "micro-batch": {"zh": ["微批次"], "not": ["微批量", "微批"]},
    "parallel program": {"zh": ["并行程序"]},
    "process": {"zh": ["进程"], "not": ["行程"]},
    "shard": {"zh": ["分片", "切分"], "not": ["碎片"]},
}


@pytest.fixture
def glossary(tmp_path) -> Glossary:
    (tmp_path / "glossary.json").write_text(json.dumps(TERMS, ensure_ascii=False))
    return Glossary(tmp_path / "glossary.json")


def misused(glossary: Glossary, text: str) -> list[tuple[int, str]]:
    found = glossary.misused_words(parse_page(text, Path("a.md"), "zh-Hans", "a"))
    return [(finding.line, finding.message.split("`")[1]) for finding in found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# 微批\n", [(1, "微批")]),
        ("甲\n微批量，再来一个微批。\n\n乙微批\n", [(2, "微批量"), (2, "微批"), (4, "微批")]),
        ("用 AllReduce 求和，AllReduce2 和 MyAllReduce 除外\n", [(1, "AllReduce")]),
        ("用 all\nreduce 求和\n", [(1, "all reduce")]),
        ("每个微\n批里\n", [(1, "微批")]),
        ("| 甲 | 乙 |\n| --- | --- |\n| 丙 | **全归约** |\n", [(3, "全归约")]),
        ("> [!NOTE]\n> 一个[碎片](a.md)\n", [(2, "碎片")]),
        ("![全归约的图](a.svg)\n", [(1, "全归约")]),
        ("- `微批`，\n  `微\n  批` 与碎片\n", [(3, "碎片")]),
    ],
)
def test_a_rejected_word_is_found_at_its_line(glossary, text, found) -> None:
    assert misused(glossary, text) == found


@pytest.mark.parametrize(
    "text",
    [
        "微批次、分片和 all-reduce，All-reduce 也可以\n",
        "内存碎片\n",
        "并行程序\n",
        "`微批` 和 `AllReduce`\n",
        "[词](微批.md#碎片) ![图](碎片.svg)\n",
        "```text\n微批\n```\n\n    碎片\n",
        "<!-- 微批 -->\n<!--- doc-test-ignore-start: 碎片 -->\n<!--- doc-test-ignore-end -->\n",
        "微`x`批\n",
    ],
)
def test_accepted_words_code_and_targets_are_left_alone(glossary, text) -> None:
    assert misused(glossary, text) == []


def test_the_message_names_the_term_and_the_accepted_words(glossary) -> None:
    [finding] = glossary.misused_words(parse_page("碎片\n", Path("a.md")))
    assert finding.message == "`碎片` is not the word for shard here: write `分片` or `切分`"


BAD = {
    "no json": ('{"a":\n}', 2, "this is no JSON"),
    "a list": ("[]", 1, "this is not of the form"),
    "a text in place of a list": ('{"a": {"zh": "甲"}}', 1, "this is not of the form"),
    "an unknown key": ('{"a": {"zh": ["甲"], "no": ["乙"]}}', 1, "this is not of the form"),
    "no accepted word": ('{"a": {"zh": [], "not": ["乙"]}}', 1, "this is not of the form"),
    "an empty word": ('{"a": {"zh": ["甲"], "not": [""]}}', 1, "this is not of the form"),
    "a word twice": ('{"a": {"zh": ["甲", "甲"]}}', 1, "this is not of the form"),
    "a term twice": ('{"a": {"zh": ["甲"]}, "a": {"zh": ["乙"]}}', 1, "this is not of the form"),
    "another order": ('{\n"b": {"zh": ["甲"]},\n"A": {"zh": ["乙"]}\n}', 3, "`A` comes after `b`: sort the terms"),
    "rejected and accepted": (
        '{\n"a": {"zh": ["甲"]},\n"b": {"zh": ["乙"], "not": ["甲"]}\n}',
        3,
        "`甲` is rejected here and accepted for a",
    ),
    "rejected twice": (
        '{\n"a": {"zh": ["甲"], "not": ["丙"]},\n"b": {"zh": ["乙"], "not": ["丙"]}\n}',
        3,
        "`丙` is rejected for a already",
    ),
}


@pytest.mark.parametrize(("text", "line", "message"), BAD.values(), ids=BAD)
def test_a_glossary_that_contradicts_itself_is_refused(tmp_path, text, line, message) -> None:
    (tmp_path / "glossary.json").write_text(text)
    found = [(finding.line, finding.message) for finding in Glossary(tmp_path / "glossary.json").faults()]
    assert any(where == line and what.startswith(message) for where, what in found), found


def test_a_glossary_may_be_missing(tmp_path) -> None:
    glossary = Glossary(tmp_path / "none.json")
    assert list(glossary.faults()) == misused(glossary, "微批\n") == []


def test_check_holds_translations_to_the_glossary(docs, capsys) -> None:
    text = "# T\n\n微批 and 碎片\n\n<!-- doc-test-command: none -->\n"
    docs.write("a", text)
    file = docs.source.parent / "glossary.json"
    file.write_text(json.dumps(TERMS, ensure_ascii=False))
    assert docs.main("--check") == 1
    out = capsys.readouterr().out
    assert f"{docs.source}/zh-Hans/a.md:3: `微批` is not the word for micro-batch here: write `微批次`" in out
    assert "/en/a.md" not in out
    file.write_text("{")
    assert docs.main("--check") == 1
    assert f"{file}:1: this is no JSON" in capsys.readouterr().out


def test_the_project_s_own_glossary_covers_the_field() -> None:
    glossary = Glossary(ROOT / "docs/glossary.json")
    assert list(glossary.faults()) == []
    wanted: Any = (
        "rank|shard|all-reduce|micro-batch|gradient accumulation|bubble|tensor parallelism|checkpoint|overflow"
    )
    wanted += "|loss scale|ZeRO|Gemini|offload|mixture of experts|expert|sequence parallelism|ring attention"
    wanted += "|lazy initialization|prefetch|pipeline schedule|hybrid parallelism|LoRA|quantization|inference"
    assert set(wanted.split("|")) <= set(glossary.terms)
    assert len(glossary.terms) >= 80
    lines = (ROOT / "docs/glossary.json").read_text().splitlines()
    assert len(lines) == len(glossary.terms) + 2
