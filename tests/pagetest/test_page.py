# pyright: reportCallIssue=false
"""The page model and the script: what is read, and that line N stays line N."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetest.model.instrument import executed_lines, instrument_script, statement_lines
from pagetest.model.reader import parse_page
from pagetest.model.script import make_script

PROSE = st.sampled_from(
    ["", "Text.", "# Title", "- item", "> quote", "| a | b |", "<div>", "    indented", "中文。", "\x0c"]
)
CODE = st.sampled_from(["x = 1", "", "if x:", "    y = 'a\x0cb\x1cc\u2028d'", "# note", "print('中文')", "<!-- c -->"])
FENCES = st.tuples(st.sampled_from(["```", "~~~", "````"]), st.sampled_from(["python", "py", "text", "", "bash"]))
PIECES = st.one_of(
    st.tuples(st.just("prose"), st.lists(PROSE, max_size=3)),
    st.tuples(FENCES, st.lists(CODE, max_size=4)),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(PIECES, max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))
def test_every_runnable_line_keeps_its_number_and_every_other_line_is_blank(pieces, newline) -> None:
    lines, code = [], {}
    for kind, content in pieces:
        if kind == "prose":
            lines += [*content, ""]
        else:
            mark, language = kind
            lines.append(f"{mark}{language}")
            code |= {len(lines) + i: line for i, line in enumerate(content)} if language in {"python", "py"} else {}
            lines += [*content, mark, ""]
    page = parse_page(newline.join(lines), Path("lesson.md"))
    script = make_script(page).text.split("\n")
    assert len(script) == len(page.lines)
    assert {i: line for i, line in enumerate(script) if line} == {i: line for i, line in code.items() if line}


def test_a_fence_in_a_list_is_dedented_in_its_lines(parse) -> None:
    page = parse("1. step\n\n   ```python\n   if True:\n       x = 1\n   ```\n")
    assert make_script(page).text.split("\n")[3:5] == ["if True:", "    x = 1"]


def test_a_fence_in_a_quote_is_code_too(parse) -> None:
    assert make_script(parse("> ```py\n> x = 1\n> ```\n")).text == "\nx = 1\n\n"


@pytest.mark.parametrize(
    "info", ["python", "py", "python3", "Python", 'python title="a.py"', "python {1,3}", "python{1,3}"]
)
def test_a_python_fence_is_recognised(parse, info) -> None:
    assert parse(f"```{info}\nx = 1\n```\n").runnable


@pytest.mark.parametrize("info", ["", "pycon", "text", "pytb", "bash", "pythonic"])
def test_another_fence_is_not_run(parse, info) -> None:
    assert not parse(f"```{info}\nx = 1\n```\n").python


@pytest.mark.parametrize(
    ("comment", "command"),
    [
        ("<!-- doc-test-command: python lesson.py -->", "python lesson.py"),
        ("<!--- doc-test-command: python lesson.py --->", "python lesson.py"),
        ("<!--doc-test-command:python lesson.py-->", "python lesson.py"),
        ("<!-- doc-test-command: python lesson.py\n  --flag -->", "python lesson.py --flag"),
        ("<!-- doc-test-command: python lesson.py --name a- -->", "python lesson.py --name a-"),
        ("<!-- doc-test-command: python lesson.py --end -- --->", "python lesson.py --end --"),
    ],
)
def test_a_command_is_read_whole(parse, comment, command) -> None:
    """Stripping the characters of `-->` from the end would eat the command's own dashes."""
    page = parse(f"text\n\n{comment}\n")
    assert page.command == command
    assert page.command_line == 3
    assert not page.findings


def test_markers_in_fences_are_text(parse) -> None:
    page = parse("```text\n<!-- doc-test-command: python lesson.py -->\n{{ autodoc:A }}\nstyle={{\n```\n")
    assert not page.commands
    assert not page.hooks
    assert not page.findings


def test_two_markers_in_one_html_block_are_both_seen_in_order(parse) -> None:
    page = parse(
        "<!--- doc-test-ignore-start: slow -->\n<!--- doc-test-ignore-end -->\n```python\nx = 1\n```\n"
        "<!--- doc-test-ignore-start: later -->\n```python\ny = 1\n```\n"
        "<!--- doc-test-ignore-end -->\n<!-- doc-test-command: python lesson.py -->\n"
    )
    assert not page.findings
    assert page.command == "python lesson.py"
    assert [(block.ignored, block.reason) for block in page.blocks] == [(False, ""), (True, "later")]


def test_an_ignored_region_is_not_in_the_script(parse) -> None:
    page = parse(
        "<!--- doc-test-ignore-start: needs 8 GPUs -->\n```python\nraise\n```\n<!--- doc-test-ignore-end -->\n"
    )
    assert make_script(page).is_empty


def test_front_matter_is_no_heading(parse) -> None:
    page = parse("---\ntitle: x\n---\n\n# Title\n\n## Part\n")
    assert [(heading.level, heading.line) for heading in page.headings] == [(1, 5), (2, 7)]


def test_a_future_import_and_a_docstring_stay_first(parse) -> None:
    page = parse('```python\n"""Doc."""\nfrom __future__ import annotations\nx = 1\n```\n')
    script = make_script(page)
    assert not script.fault
    marked, namespace = instrument_script(script, "f"), {}
    assert statement_lines(marked.marks) == [4]
    exec(marked.code, namespace)  # noqa: S102
    assert namespace["__doc__"] == "Doc."


CODE_WITH_ALL_STATEMENTS = '''
import os

@staticmethod
def f(x):
    """Doc."""
    global G
    G = 1
    def inner():
        nonlocal x
        x = 2
        return x
    return inner()

class C:
    """Doc."""
    a = 1
    def m(self): return 2

for i in range(2):
    if i:
        pass
    elif not i:
        f(1)
    else:
        never = 1
while False:
    never = 2
try:
    raise ValueError
except ValueError:
    caught = 1
else:
    never = 3
finally:
    done = 1
with open(os.devnull) as file: file.read()
match 3:
    case 3:
        matched = 1
    case _:
        never = 4
values = [
    i
    for i in range(3)
]
for i in range(1):
    if i == 0:
        continue
    never = 2
if not i: one = 0; two = 1
if i: one = 1; never = 5
...
'''


def test_lines_are_marked_exactly_when_they_run(parse) -> None:
    script = make_script(parse(f"```python{CODE_WITH_ALL_STATEMENTS}```\n"))
    marked, seen = instrument_script(script, "page.py"), set()
    namespace: dict[str, Any] = dict.fromkeys(marked.names, False) | {"__page__": SimpleNamespace(ran=seen.add)}
    exec(marked.code, namespace)  # noqa: S102
    assert namespace["C"]().m() == 2
    source = CODE_WITH_ALL_STATEMENTS.split("\n")
    reached = seen | {number for number, name in enumerate(marked.names) if namespace[name]}
    missed = set(statement_lines(marked.marks)) - set(executed_lines(marked.marks, reached))
    never = {*(f"never = {number}" for number in range(1, 5)), "if i: one = 1; never = 5"}
    assert {source[line - 1].strip() for line in missed} == never
    silent = {'"""Doc."""', "global G", "nonlocal x", "pass", "..."}
    assert not silent & {source[line - 1].strip() for line in statement_lines(marked.marks)}
    assert marked.last in reached


def test_the_code_hash_sees_code_and_not_comments(parse) -> None:
    one, same, other = (
        make_script(parse(f"```python\n{code}\n```\n")).code_hash for code in ("x = 1  # a", "# b\nx  =  1", "x = 2")
    )
    assert one == same != other


def test_prose_is_what_a_reader_reads_line_by_line(parse) -> None:
    page = parse(
        "# The *title* `code`\n\n> one [two](three.md)\n> `four\n> five` six <b>seven</b>\n> ![eight](nine.svg)\n\n"
        "| ten | `x` |\n| --- | --- |\n| eleven | twelve |\n\n```text\nthirteen\n```\n\n<!-- fourteen -->\n"
    )
    found = [[(note.text.replace("\ufffc", "@"), note.line) for note in part] for part in page.prose]
    assert found == [
        [("The title @", 1)],
        [("one two", 3), ("", 4), ("@ six @seven@", 5), ("eight", 6)],
        [("ten", 8)],
        [("@", 8)],
        [("eleven", 10)],
        [("twelve", 10)],
    ]
