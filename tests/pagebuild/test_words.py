"""The words that the emitters add to pages are those of the glossary."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagebuild.notebook import texts as notebook
from pagebuild.site.landing import texts as landing
from pagetest.checks.glossary import Glossary
from pagetest.model.reader import parse_page

pytestmark = pytest.mark.slow

GLOSSARY = Glossary(Path(__file__).resolve().parents[2] / "docs" / "glossary.json")


def chinese(content: Any) -> Iterator[str]:
    for key, value in content.items():
        if key == "zh-Hans":
            yield value
        elif isinstance(value, dict):
            yield from chinese(value)


def rejected(texts: list[str]) -> list[str]:
    page = parse_page("\n\n".join(texts), Path("texts.md"), "zh-Hans")
    return [finding.message for finding in GLOSSARY.misused_words(page)]


@pytest.mark.parametrize("file", [notebook.FILE, landing.FILE])
def test_the_chinese_words_are_the_accepted_ones(file) -> None:
    texts = list(chinese(json.loads(file.read_text(encoding="utf-8"))))
    assert len(texts) > 10
    assert rejected(texts) == []


def test_a_rejected_word_is_seen() -> None:
    assert "梯度积累" in rejected(["按范数梯度积累。"])[0]
