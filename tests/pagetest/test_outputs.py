"""Output blocks: a page shows what its Python prints on rank 0, or it fails at the line that differs."""

import platform
import stat

import pytest

from pagetest.checks.parity import compare_structure
from pagetest.checks.rules import check_page
from pagetest.model.script import make_script
from pagetest.outputs import library_texts

pytestmark = pytest.mark.slow

COMMAND = "<!-- doc-test-command: python lesson.py -->\n"
RUN = ("lesson", "--lang", "en")


def page(*blocks: str) -> str:
    """A page of fenced blocks: `text output` ones begin with a tilde and the words behind `output`."""
    parts = []
    for block in blocks:
        words, _, text = block.partition("\n") if block.startswith("~") else ("", "", block)
        info = f"text output{words[1:]}" if words else "python"
        parts += [f"```{info}", *text.strip("\n").splitlines(), "```\n\n"]
    return "\n".join(parts).replace("```\n\n\n", "```\n\n") + COMMAND


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print('a', 0.5)\nprint('b')", "a  0.50001\nb"),
        ("import sys\nsys.stdout.write('a')\nprint('b')", "ab"),
        ("import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')", "a\nc"),
        ("import ctypes\nctypes.CDLL(None).printf(b'%d\\n', 7)\nprint('after')", "7\nafter"),
        ("import subprocess\nprint('a')\nsubprocess.run(['echo', 'b'])\nprint('c')", "a\nb\nc"),
        ("import os\nos.write(1, b'a')\nos.system('echo b')", "ab"),
        ("import sys\nsys.stdout.reconfigure(write_through=False)\nsys.stdout.write('late')", "late"),
        ("import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    print('kept')\nprint(1)", "1"),
        ("import os\nif not os.fork():\n    print('a')\n    os._exit(0)\nos.wait()\nprint('b')", "a\nb"),
        ("import atexit\natexit.register(print, 'last')\nprint('first')", "first"),
        ("print('中文 é')", "中文 é"),
    ],
)  # fmt: skip
def test_what_a_block_prints_is_what_its_process_writes_to_stdout(docs, code, shown) -> None:
    docs.write("lesson", page(code, f"~\n{shown}"), "en")
    done = docs.run(*RUN)
    assert done.returncode == 0, done.stdout
    assert "  outputs 1/1\n" in done.stdout


@pytest.mark.parametrize(("code", "fails"), [("'get_path(\"stdlib\")'", False), ("'files of its own'", True)])
def test_texts_of_another_python_are_not_compared(docs, monkeypatch, capfd, code, fails) -> None:
    """A page that trains on the standard library's files prints other losses where these have other words."""
    monkeypatch.setattr(library_texts, "RECORDED_PYTHON", "3.11.0")
    text = page(f"source = {code}\nprint('loss', 5.25)", "~\nloss 6.5", "print('accuracy', 0.5)", "~\naccuracy 0.5")
    docs.write("lesson", text, "en")
    assert (docs.main(*RUN) != 0) is fails
    report = capfd.readouterr().out
    docs.main(*RUN, "--update-outputs")
    here = platform.python_version()
    why = f"outputs 1/2, 1 not compared: files of Python {here} train it, and it shows results of 3.11.0\n"
    assert (why in report) is not fails
    assert ("loss 6.5" in (docs.source / "en/lesson.md").read_text(encoding="utf-8")) is not fails
    docs.write("lesson", text, "en")
    monkeypatch.setattr(library_texts, "RECORDED_PYTHON", here)
    assert docs.main(*RUN) != 0
    assert "was expected to print `loss 6.5` here and printed `loss 5.25`" in capfd.readouterr().out


def test_each_block_has_its_own_output(docs) -> None:
    """Functions print for the block that calls them, and a statement may go on in the next block."""
    blocks = (
        '"""A lesson."""',
        "from __future__ import annotations\ndef f(x):\n    print('f', x)\n\nprint('first')",
        "~\nfirst",
        "f(1)",
        "~\nf 1",
        "print('not shown')",
        "for i in range(2):\n    print('even', 2 * i)",
        "~\neven 0\neven 2",
        "    f(2 * i + 1)\nprint('end')",
        "~\nf 1\nf 3\nend",
        "class C:\n    print('in a class')",
        "~\nin a class",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    print('caught')",
        "~\ncaught",
        "    print('and more')\nfinally:\n    print('done')",
        "~\nand more\ndone",
    )
    docs.write("lesson", page(*blocks), "en")
    done = docs.run(*RUN)
    assert done.returncode == 0, done.stdout
    assert "  outputs 7/7\n" in done.stdout


def test_a_stale_output_fails_at_the_line_that_differs(docs) -> None:
    docs.write("lesson", page("print('a')\nprint('b')", "~\na\nc", "print(1)", "~\n1", "print(2)", "~\n2\n3"), "en")
    done = docs.run(*RUN)
    assert done.returncode == 1
    assert "FAIL  cpu x1" in done.stdout
    assert "  outputs 1/3\n" in done.stdout
    where = docs.source / "en/lesson.md"
    assert (
        f"{where}:8: the block at line 2 was expected to print `c` here and printed `b`: run with --update-outputs\n"
        in done.stdout
    )
    assert "  >    8 | c\n" in done.stdout
    assert f"{where}:25: the block at line 20 was expected to print `3` here and printed nothing: " in done.stdout
    [entry] = docs.records.read()
    assert (entry["outputs_matched"], entry["outputs_total"]) == (1, 3)
    assert entry["error"]["line"] == 8


@pytest.mark.parametrize(
    ("code", "shown", "message"),
    [
        ("x = 1", "a", "lesson.md:6: the block at line 2 prints nothing on rank 0"),
        ("x = 1", "", "lesson.md:6: the block at line 2 prints nothing on rank 0"),
        ("print('a')", "", "lesson.md:6: the block at line 2 was expected to print nothing here and printed `a`"),
        ("print('a')\nprint('b')", "a", "lesson.md:8: the block at line 2 was expected to print nothing here"),
        ("import sys\nprint('a', file=sys.stderr)", "a", "prints nothing on rank 0"),
    ],
)
def test_nothing_is_no_output(docs, code, shown, message) -> None:
    docs.write("lesson", page(code, f"~\n{shown}"), "en")
    done = docs.run(*RUN)
    assert done.returncode == 1
    assert message in done.stdout


def test_exact_means_every_digit(docs) -> None:
    docs.write("lesson", page("print(0.5)", "~ exact\n0.50001"), "en")
    assert "was expected to print `0.50001` here and printed `0.5`" in docs.run(*RUN).stdout


def test_only_rank_0_counts_and_the_log_keeps_the_order(docs) -> None:
    code = """
import os, sys
rank = int(os.environ["RANK"])
print("rank", rank)
print("to stderr of", rank, file=sys.stderr)
os.system("echo from C of 0") if rank == 0 else print("only 1")
print("last of", rank)
"""
    text = page(code, "~\nrank 0\nfrom C of 0\nlast of 0")
    docs.write("lesson", text.replace("python lesson", "torchrun --standalone --nproc_per_node=2 lesson"), "en")
    done = docs.run(*RUN)
    assert done.returncode == 0, done.stdout
    log = (docs.build / "en/lesson/log.txt").read_text().splitlines()
    mine = ["rank 0", "to stderr of 0", "from C of 0", "last of 0"]
    assert [line for line in log if line in mine] == mine
    assert {"rank 1", "to stderr of 1", "only 1"} <= set(log)


def test_verbose_shows_captured_output_once_and_in_order(docs) -> None:
    code = (
        "import os, sys\nfor i in range(200):\n    print(i, file=(sys.stdout, sys.stderr)[i % 2])\nos.system('echo C')"
    )
    docs.write("lesson", page(code, "~\n0\n...\nC"), "en")
    done = docs.run(*RUN, "-v")
    assert done.stdout.startswith("".join(f"{i}\n" for i in range(200)) + "C\nen "), done.stdout


def test_a_page_that_sends_its_stdout_elsewhere_is_left_alone(docs) -> None:
    """The page runs itself as a program whose output it reads."""
    code = """
import subprocess, sys
if len(sys.argv) > 1:
    print("inner")
else:
    done = subprocess.run([sys.executable, __file__, "again"], capture_output=True, text=True)
    print("read", done.stdout)
"""
    docs.write("lesson", page(code, "~\nread inner"), "en")
    done = docs.run(*RUN)
    assert done.returncode == 0, done.stdout


def test_a_page_that_fails_is_not_blamed_for_its_output(docs) -> None:
    docs.write("lesson", page("print('a')", "~\nb", "raise ValueError('boom')"), "en")
    done = docs.run(*RUN, "--update-outputs")
    assert "ValueError: boom" in done.stdout
    assert "expected" not in done.stdout
    assert "~\nb" in page("print('a')", "~\nb").replace("```text output", "~")
    assert (docs.source / "en/lesson.md").read_text() == page("print('a')", "~\nb", "raise ValueError('boom')")


IGNORED = "<!-- doc-test-ignore-start: slow -->\n```{}\nx\n```\n<!-- doc-test-ignore-end -->\n\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("```text output\na\n```\n", 1, "there is no code before this output"),
        ("```bash\nls\n```\n\n```text output\na\n```\n", 5, "there is no code"),
        (page("print(1)", "~\n1", "~\n1"), 9, "the block at line 6 shows the output of the same code"),
        (page("print(1)") + IGNORED.format("text output"), 7, "output in an ignored region"),
        (page("x = 1") + IGNORED.format("python") + "```text output\na\n```\n", 12, "in an ignored region: write"),
        (page("print(1)", "~ Exactly\n1"), 5, "`text output Exactly` is no block"),
        (page("print(1)", "~ exact all\n1"), 5, "is no block"),
        (page("print(1)").replace(COMMAND, "```console output\n1\n```\n"), 5, "`console output` is no block"),
        (page("print(1)", "~\n...\n\n..."), 5, "`...` alone stands for any output"),
        (
            page("print(1)").replace(COMMAND, "\n```text\n1\n```\n" + COMMAND),
            6,
            "reads as its output, but is not compared",
        ),
    ],
)
def test_output_that_cannot_be_compared_is_refused(parse, text, line, message) -> None:
    parsed = parse(text)
    found = [(finding.line, finding.message) for finding in check_page(parsed, make_script(parsed))]
    assert any(where == line and message in what for where, what in found), found


def test_prose_and_plain_text_may_stand_between(parse) -> None:
    text = (
        page("print(1)").replace(COMMAND, "words\n\n```text\nplain\n```\n\n> ```text output\n> 1\n> ```\n\n") + COMMAND
    )
    parsed = parse(text)
    assert check_page(parsed, make_script(parsed)) == []


def test_a_translation_shows_the_output_of_the_same_code(docs, capsys) -> None:
    docs.write("lesson", page("print(1)", "~\n1\n"), "en")
    docs.write("lesson", page("print(1)", "~\n 1\n").replace("\n1\n", "\n 1\n"), "zh-Hans")
    assert docs.main("--check") == 1
    assert "zh-Hans/lesson.md:6: this is not the output at" in capsys.readouterr().out
    done = docs.run("lesson")
    assert "en      lesson   PASS" in done.stdout
    assert "zh-Hans lesson   FAIL" in done.stdout


@pytest.mark.parametrize("other", [("print(1)",), ("print(1)", "~ exact\n1"), ("print(1)", "x = 1", "~\n1")])
def test_a_translation_has_the_same_output_blocks(parse, other) -> None:
    original = parse(page("print(1)", "~\n1", "x = 1") if "x = 1" in other else page("print(1)", "~\n1"))
    assert compare_structure(original, parse(page(*other))).findings


def test_a_translation_that_prints_other_words_has_its_own_output(docs) -> None:
    docs.write("lesson", page("print('loss', 1.0)", "~\nloss 1.0"), "en")
    docs.write("lesson", page("print('损失', 1.0)", "~\n损失 1.0"), "zh-Hans")
    done = docs.run("lesson")
    assert done.stdout.count("PASS") == done.stdout.count("outputs 1/1") == 2, done.stdout
    docs.write("lesson", page("print('损失', 1.0)", "~\nloss 1.0"), "zh-Hans")
    assert "was expected to print `loss 1.0` here and printed `损失 1.0`" in docs.run("lesson").stdout


def test_update_outputs_rewrites_both_languages_and_nothing_else(docs) -> None:
    """The first line is kept for its digits, the dots because they hold; the page has two kinds of frames."""
    code = "print(f'loss {0.5 + 1e-6}')\nprint('took 3 s')\nprint('end', 2)"
    text = (
        "\ufeff# T\u00a0\r\n\r\n- item  \r\n\r\n  ```python\r\n  {}\r\n  ```\r\n\r\n"
        "  > ```text output\r\n  > loss 0.5\r\n  > took ... s\r\n  >   end   1\r\n  > ```\r\n \r\nlast\r\n\r\n"
        + COMMAND
    ).replace("{}", code.replace("\n", "\r\n  "))
    for language in ("en", "zh-Hans"):
        path = docs.source / language / "lesson.md"
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode())
        path.chmod(0o640)
    done = docs.run("lesson", "--update-outputs")
    assert done.returncode == 0, done.stdout
    assert "outputs 1/1, 1 rewritten\n" in done.stdout
    assert "SAME  code identical to en, 1 rewritten\n" in done.stdout
    for language in ("en", "zh-Hans"):
        path = docs.source / language / "lesson.md"
        assert path.read_bytes().decode() == text.replace(">   end   1\r\n", "> end 2\r\n")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert [file.name for file in path.parent.iterdir()] == ["lesson.md"]
    before = [(docs.source / language / "lesson.md").stat().st_mtime_ns for language in ("en", "zh-Hans")]
    assert ", 1 rewritten" not in docs.run("lesson", "--update-outputs").stdout
    assert [(docs.source / language / "lesson.md").stat().st_mtime_ns for language in ("en", "zh-Hans")] == before


def test_update_outputs_fills_empty_blocks_and_lines_move(docs) -> None:
    docs.write("lesson", page("print('a\\n\\nb')", "~\n", "print('c')", "~\n", "x = 1"), "en")
    docs.write("lesson", page("print('甲\\n\\n乙')", "~\n", "print('丙')", "~\n", "x = 1"), "zh-Hans")
    done = docs.run("lesson", "--update-outputs")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("outputs 2/2, 2 rewritten") == 2
    wanted = page("print('a\\n\\nb')", "~\na\n\nb", "print('c')", "~\nc", "x = 1")
    assert (docs.source / "en/lesson.md").read_text() == wanted
    assert "text output\n甲\n\n乙\n```" in (docs.source / "zh-Hans/lesson.md").read_text()
    assert docs.run("lesson").returncode == 0


def test_a_translation_that_only_shows_other_output_is_rewritten_too(docs) -> None:
    docs.write("lesson", page("print(1)", "~\n1"), "en")
    docs.write("lesson", page("print(1)", "~\n2"), "zh-Hans")
    assert "SAME  code identical to en, 1 rewritten" in docs.run("lesson", "--update-outputs").stdout
    assert (docs.source / "zh-Hans/lesson.md").read_text() == page("print(1)", "~\n1")


REFUSED = {
    "a block that should go": (page("x = 1", "~\n1"), "prints nothing on rank 0: drop this block"),
    "a fence in the output": (page("print('`' * 3)", "~\n1"), "the output holds the fence `" + "`" * 3),
    "a page that changed": (
        page(
            f"import os\nos.system({f'echo {COMMAND.strip()!r} >> ../../../../source/en/lesson.md'!r})\nprint(1)",
            "~\n2",
        ),
        "the page is no longer what ran",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_rewritten_is_left_alone(docs, text, message) -> None:
    docs.write("lesson", text, "en")
    done = docs.run(*RUN, "--update-outputs")
    assert done.returncode == 1
    assert message in done.stdout
    assert ", 1 rewritten" not in done.stdout
    assert (docs.source / "en/lesson.md").read_text() in {text, text + COMMAND}
