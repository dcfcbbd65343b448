"""The rules of honesty: what could hide a failure, or reads as what it is not, is refused before it runs."""

import pytest

from pagetest.checks.rules import check_page
from pagetest.model.script import make_script

COMMAND = "\n<!-- doc-test-command: python lesson.py -->\n"


def findings(parse, code: str, text: str = "") -> list[str]:
    page = parse(f"```python\n{code}\n```\n{text}{COMMAND}")
    return [str(finding) for finding in check_page(page, make_script(page))]


REFUSED = {
    "assertion is always true": ["assert (x, 'message')", "assert (1 == 2, 'never')"],
    "SyntaxWarning|SyntaxError|DeprecationWarning": ["x = '\\d'", "assert x is 1", "assert [0] is not 0", "x = 1()"],
    "is always true, so this asserts nothing": [
        "assert 'message'", "assert True", "assert 1 == 1", "assert [x]", "assert {x: 1}", "assert {*x, 2}",
        "assert lambda: x", "assert x or 'no'", "assert not ()", "assert f'no {x}'", "assert (y := 'x')", "assert ...",
        "assert not None", "assert (z for z in x)", "assert not (False and x)", "assert x or not 0",
        "assert -1 < 2 ** 3",
    ],
    "catches the errors of failing checks too": [
        "try:\n    x\nexcept AssertionError:\n    y", "try:\n    x\nexcept Exception as e:\n    y",
        "try:\n    x\nexcept:\n    y",
        "try:\n    x\nexcept (ValueError, BaseException):\n    y", "try:\n    x\nexcept* AssertionError:\n    y",
        "E = Exception", "import builtins\nE = builtins.AssertionError", "with suppress(AssertionError):\n    x",
        "with pytest.raises(Exception):\n    x", "with expect_error(ValueError, AssertionError):\n    x",
        "case.assertRaises(AssertionError, f)", "E = (ValueError, Exception)",
        "from builtins import Exception as E",
    ],
    "checks the body of its own `with`": [
        "expect_error(ValueError)", "manager = expect_error(ValueError)",
        "stack.enter_context(expect_error(ValueError))",
        "with suppress(OSError), expect_error(ValueError):\n    x", "with expect_error(ValueError), y:\n    x",
        "E = testing.expect_error", "from colossal.testing import expect_error as e", "def expect_error(x):\n    y",
        "with (e := expect_error)(ValueError):\n    x", "expect_error = suppress", "class expect_error:\n    x",
    ],
    "in a `finally` drops the exception": [
        "def f():\n    try:\n        x\n    finally:\n        return 1",
        "for i in x:\n    try:\n        x\n    finally:\n        break",
        "while x:\n    try:\n        x\n    finally:\n        if y:\n            continue",
        "def f():\n    try:\n        x\n    finally:\n        for i in x:\n            with y:\n                return",
        "def f():\n    try:\n        x\n    finally:\n        try:\n            y\n        except x: return",
    ],
    "is Python's own": [
        "all = len", "def any(x):\n    return 1", "from operator import not_ as all", "for len in x:\n    y",
        "class ValueError(KeyError):\n    pass", "with x as sum:\n    y", "AssertionError = ValueError", "del abs",
    ],
    "are the harness's": [
        "__page__ = x", "x.__page__", "__mark_3__ = True", "globals()['__mark_3__'] = True", "x = '__page__'",
    ],
    "has letters that may look like others": [
        "\u0430ssert_close(x)", "def f(\u0445):\n    pass", "\uff41ssert (1 == 2)", "x.\u0435qual(y)", "变量 = 1",
    ],
    "cannot be seen": [
        "x = 1  # \u202e }\u2066 if y", "x = '\u200b'", "assert x  # \u2028y", "# \u2069", "x = 1 # \x0cassert y",
        "x = '\ufeff'",
    ],
}  # fmt: skip
ACCEPTED = [
    "assert x, 'message'", "assert (x)", "assert x == (1, 'y')", "assert x or y", "assert [*x]", "assert f'{x}'",
    "assert not x",
    "assert x[0]", "assert False, 'not reached'", "assert 1 / 0", "assert all(y for y in x)", "assert x is None",
    "try:\n    x\nexcept ValueError:\n    y", "try:\n    x\nexcept (OSError, KeyError) as error:\n    y",
    "from colossal.testing import expect_error\nwith expect_error(ValueError) as errors:\n    x",
    "with colossal.testing.expect_error(ValueError, OSError):\n    with x:\n        y",
    "raise AssertionError('it was accepted')", "class E(Exception):\n    pass",
    "def f(e: Exception) -> BaseException:\n    raise e",
    "assert isinstance(x, Exception)", "raise Exception", "x: Exception = y",
    "def f():\n    try:\n        x\n    finally:\n        for i in x:\n            break\n    return 1",
    "def f():\n    try:\n        x\n    finally:\n        def g():\n            return 1",
    "def f(input, all=1):\n    return input",
    "x.all = 1", "f(sum=1)", "x = '果'  # 注释：‘引号’", "print('👩\u200d🔬')",
]  # fmt: skip


@pytest.mark.parametrize(("message", "code"), [(message, code) for message in REFUSED for code in REFUSED[message]])
def test_code_that_could_hide_a_failure_is_refused(parse, message, code) -> None:
    found = findings(parse, code)
    assert any(part in finding for finding in found for part in message.split("|")), found
    assert all(finding.startswith("lesson.md:") for finding in found)


@pytest.mark.parametrize("code", ACCEPTED)
def test_code_that_looks_alike_is_accepted(parse, code) -> None:
    assert findings(parse, code) == []


@pytest.mark.parametrize("text", ["写出 \u202e 的文字", "text \u2066 here", "zero\u200bwidth"])
def test_hidden_characters_are_refused_in_prose_too(parse, text) -> None:
    assert any(
        "cannot be seen" in finding and finding.startswith("lesson.md:5: ")
        for finding in findings(parse, "x = 1", f"\n{text}\n")
    )


def test_chinese_prose_with_its_punctuation_is_accepted(parse) -> None:
    assert findings(parse, "x = 1", "\n中文：“引号”——省略……（全角），é，\u00a0，\u3000。\n") == []


@pytest.mark.parametrize("flag", ["-O", "-OO", "-uO"])
def test_a_command_that_switches_asserts_off_is_refused(parse, flag) -> None:
    page = parse(f"```python\nx = 1\n```\n<!-- doc-test-command: python {flag} lesson.py -->\n")
    assert any("switches asserts off" in str(finding) for finding in check_page(page, make_script(page)))
