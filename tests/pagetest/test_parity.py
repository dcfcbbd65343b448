"""A translation differs in words only."""

import pytest

from pagetest.checks.parity import Parity, compare_structure

PAGE = """# Title

```python
import logging
def f(x):
    # a comment
    return x + 1
print("result", f(1))
assert f(1) == 2, "wrong"
logger = logging.getLogger("a")
logger.info(f"step {f(1)}")
```

## Part

{{ autodoc:colossal.Booster }}

<!--- doc-test-ignore-start: slow -->
```python
f(2)
```
<!--- doc-test-ignore-end -->

<!-- doc-test-command: python lesson.py -->
"""


def parity(parse, *changes: tuple[str, str]) -> Parity:
    text = PAGE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return compare_structure(parse(PAGE), parse(text, language="zh-Hans"))


@pytest.mark.parametrize(
    "change",
    [("# Title", "# 标题"), ("# a comment", "# 注释"), ("    # a comment", '    """文档。"""'), ("x + 1", "x+1")],
)
def test_words_comments_and_docstrings_may_differ(parse, change) -> None:
    found = parity(parse, change)
    assert found.findings == ()
    assert found.same_code


@pytest.mark.parametrize("change", [('"result"', '"结果"'), ('"wrong"', '"错误"'), ('f"step {f(1)}"', 'f"{f(1)} 步"')])
def test_what_is_printed_may_be_translated_and_is_another_code(parse, change) -> None:
    found = parity(parse, change)
    assert found.findings == ()
    assert not found.same_code


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        (("return x + 1", "return x + 2"), 7, "the first code that differs from lesson.md:7"),
        (("f(1))", "f(3))"), 8, "the first code"),
        (('getLogger("a")', 'getLogger("b")'), 10, "the first code"),
        (('logger.info(f"step {f(1)}")', "pass"), 11, "the first code"),
        (('logger.info(f"step {f(1)}")\n', ""), 10, "the first code"),
        (("## Part", "### Part"), 14, "the first heading level"),
        (("## Part", "Part"), 25, "the first heading level"),
        (("Booster", "Plugin"), 16, "the first autodoc hook"),
        (("python lesson", "python -u lesson"), 24, "the first command"),
        (("f(2)", "f(3)"), 20, "the first ignored code"),
        (("## Part", "```python\nx = 1\n```\n\n## Part"), 15, "the first block of code"),
    ],
)
def test_every_other_difference_is_found_at_its_line(parse, change, line, message) -> None:
    found = parity(parse, change)
    assert any(finding.line == line and finding.message.startswith(message) for finding in found.findings), found
    assert not found.same_code


def test_a_merged_block_is_a_difference(parse) -> None:
    one = parse("```python\nx = 1\n```\n\n```python\ny = 1\n```\n")
    other = parse("```python\nx = 1\ny = 1\n```\n")
    assert compare_structure(one, other).findings
