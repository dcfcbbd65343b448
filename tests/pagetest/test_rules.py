"""Every refusal names the file, the line and what to do."""

import pytest

from pagetest.checks.rules import check_page
from pagetest.model.page import Page
from pagetest.model.script import make_script

START = "<!-- doc-test-ignore-start: a -->\n"
COMMAND = "<!-- doc-test-command: python lesson.py -->"


def findings(page: Page) -> list[str]:
    return [str(finding) for finding in check_page(page, make_script(page))]


def page_with(parse, command: str, code: str = "x = 1", name: str = "lesson") -> Page:
    return parse(f"```python\n{code}\n```\n\n<!-- doc-test-command: {command} -->\n", name)


@pytest.mark.parametrize(
    "command",
    [
        "python lesson.py",
        "python -u lesson.py --epochs 2",
        "torchrun --standalone --nproc_per_node=2 lesson.py",
        "torchrun --standalone --nproc_per_node 2 --rdzv_endpoint localhost:0 lesson.py --lr 0.1",
        "python -m torch.distributed.run --standalone lesson.py",
        "colossal run --nproc_per_node 2 lesson.py",
    ],
)
def test_a_good_command_is_accepted(parse, command) -> None:
    assert findings(page_with(parse, command)) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo", "`echo` does not run the page's code: use torchrun, python or colossal run"),
        ('echo "this does not need a test"', "does not run the page's code"),
        ("bash run.sh", "does not run the page's code"),
        ("RANK=0 python lesson.py", "does not run the page's code"),
        ("", "does not run the page's code"),
        ("none", "line 2 holds Python that nothing would run"),
        ("torchrun --nproc_per_node=2 lesson.py", "add `--standalone`"),
        ("python -m torch.distributed.run lesson.py", "add `--standalone`"),
        ("torchrun --standalone --master_port 29500 lesson.py", "fixes a port"),
        ("torchrun --standalone --master-port=29500 lesson.py", "fixes a port"),
        ("torchrun --standalone --rdzv_endpoint=localhost:29500 lesson.py", "fixes a port"),
        ("colossal run --master_port 29500 lesson.py", "fixes a port"),
        ("python other.py", "names other.py: write `lesson.py`"),
        ("python lesson.py other.py", "names lesson.py, other.py"),
        ("python sub/lesson.py", "names sub/lesson.py"),
        ("python", "names no script"),
        ("python -c pass lesson.py", "drop `-c`"),
        ("python -I lesson.py", "drop `-I`"),
        ("python -m lesson lesson.py", "drop `-m`"),
        ("python lesson.py || true", "no shell runs the command"),
        ("python lesson.py; echo ok", "no shell runs the command"),
        ("python 'lesson.py", "close its quotes"),
        ("colossal check lesson.py", "`colossal run`"),
    ],
)
def test_a_bad_command_is_refused(parse, command, message) -> None:
    found = findings(page_with(parse, command))
    assert any(finding.startswith("lesson.md:5: ") and message in finding for finding in found), found


def test_a_page_without_a_command_is_refused(parse) -> None:
    (found,) = findings(parse("# Title\n"))
    assert "names the command that runs it, and this one has none" in found


def test_a_second_command_is_refused(parse) -> None:
    (found,) = findings(parse(f"```python\nx = 1\n```\n{COMMAND}\n\n{COMMAND}\n"))
    assert found.startswith("lesson.md:6: a page has one command; another stands at line 4")


def test_a_page_without_code_says_none(parse) -> None:
    assert findings(parse("# Title\n\n<!-- doc-test-command: none -->\n")) == []
    (found,) = findings(parse(f"# Title\n\n{COMMAND}\n"))
    assert found.startswith("lesson.md:3: there is no Python to run here")


def test_a_page_whose_code_is_all_ignored_says_why(parse) -> None:
    text = "<!--- doc-test-ignore-start{} -->\n```python\nx = 1\n```\n<!--- doc-test-ignore-end -->\n"
    text += "<!-- doc-test-command: none -->\n"
    assert findings(parse(text.format(": needs 8 GPUs"))) == []
    (found,) = findings(parse(text.format("")))
    assert found.startswith("lesson.md:1: an ignored region says why")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("<!--- doc-test-ignore-start: a -->\ntext\n", 1, "never closed"),
        ("text\n\n<!--- doc-test-ignore-end -->\n", 3, "closes nothing"),
        (START + START + "<!-- doc-test-ignore-end -->\n", 2, "inside the region opened at line 1"),
        ("<!-- doc-test-skip: a -->\n", 1, "unknown marker `doc-test-skip: a`"),
        ("<!--- ignore-test-start -->\n", 1, "unknown marker"),
        ("<!---- doc-test-ignore-end -->\n", 1, "unknown marker"),
        ("<!-- doctest-command: echo -->\n", 1, "unknown marker"),
        ("<!-- doc-test-command python lesson.py -->\n", 1, "unknown marker"),
        ("a sentence <!-- doc-test-ignore-end --> goes on\n", 1, "inside a sentence"),
        ("<!-- doc-test-command: none\n", 1, "the comment is never closed"),
        ("text\n\n```python\nx = 1\n", 3, "the fence is never closed"),
        ("text {{ autodoc:colossal.Booster }}\n", 1, "an autodoc hook is a paragraph of one line"),
        ("first\n{{ autodoc:colossal.Booster }}\n", 2, "an autodoc hook"),
        ("# {{ autodoc:colossal.Booster }}\n", 1, "an autodoc hook"),
        ("- {{ autodoc:colossal.Booster }}\n", 1, "an autodoc hook"),
        ("<div>\n{{ autodoc:colossal.Booster }}\n</div>\n", 2, "an autodoc hook"),
        ("{{ autodoc:1 2 }}\n", 1, "an autodoc hook"),
        ('text\n\n<figure style={{textAlign: "center"}}>\n', 3, "JSX"),
        ('<div style={{textAlign: "center"}}>\n</div>\n', 1, "JSX"),
    ],
)  # fmt: skip
def test_bad_markdown_is_refused_at_its_line(parse, text, line, message) -> None:
    found = findings(parse(text))
    assert any(finding.startswith(f"lesson.md:{line}: ") and message in finding for finding in found), found


def test_a_lone_hook_is_read_wherever_it_is_literal_it_is_not(parse) -> None:
    page = parse("{{ autodoc:colossal.booster.Booster }}\n\nWrite `{{ autodoc:Name }}` and `style={{`.\n")
    assert [(hook.text, hook.line) for hook in page.hooks] == [("colossal.booster.Booster", 1)]
    assert not page.findings


@pytest.mark.parametrize("name", ["random", "basics/profile", "torch", "numpy", "features/pytest"])
def test_a_stem_that_shadows_a_module_is_refused(parse, name) -> None:
    stem = name.rpartition("/")[2]
    (found,) = findings(page_with(parse, f"python {stem}.py", name=name))
    assert f"`{stem}.py` would shadow" in found


def test_a_stem_that_the_page_itself_imports_is_refused(parse) -> None:
    (found,) = findings(page_with(parse, "python lesson.py", code="from lesson.parts import x"))
    assert "would shadow the package `lesson`" in found


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['MASTER_PORT'] = '29500'",
        "import os\nos.environ.setdefault('MASTER_PORT', '29500')",
        "x = 1\nenv = {'MASTER_PORT': '29500'}",
        "x = 1\nlaunch(rank=0, port=29500)",
        "x = 1\ninit(init_method='tcp://localhost:29500')",
    ],
)
def test_a_fixed_port_in_the_code_is_refused(parse, code) -> None:
    (found,) = findings(page_with(parse, "python lesson.py", code=code))
    assert found.startswith("lesson.md:3: ")
    assert "fixes a port" in found


@pytest.mark.parametrize("code", ["f(port=0)", "f(port=free())", "x = f'tcp://localhost:{port}'", "d = {'port': p}"])
def test_a_free_port_is_accepted(parse, code) -> None:
    assert findings(page_with(parse, "python lesson.py", code=code)) == []


def test_a_syntax_error_is_reported_with_its_markdown_line(parse) -> None:
    (found,) = findings(page_with(parse, "python lesson.py", code="x = 1\nif x\n"))
    assert found == "lesson.md:3: SyntaxError: expected ':'"
