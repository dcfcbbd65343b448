"""`--check` over this project's own pages: nothing is wrong with them, and torch is not needed; faults have a line."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import runpy, sys
sys.argv = [sys.argv[1], "--check"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    heavy = {"torch", "numpy", "psutil", "colossal", "transformers"} & set(sys.modules)
    print("imported:", sorted(heavy))
"""


def test_the_pages_of_the_project_are_checked_without_torch() -> None:
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "docs_test.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" pages checked, 0 findings\nimported: []\n"), done.stdout


GOOD = "# T\n\n## Part\n\n{{ autodoc:colossal.booster.Booster }}\n\n[a](#part)\n\n```python\nprint(1)\n```\n\n"
GOOD += "```text output\n1\n```\n\n<!-- doc-test-command: python lesson.py -->\n"
BROKEN = {
    "a broken hook": ("Booster }}", "Boster }}", "lesson.md:5: the hook shows `colossal.booster.Boster`"),
    "a dead anchor": ("(#part)", "(#parts)", "lesson.md:7: the link `#parts` leads to no heading"),
    "a dead link": ("(#part)", "(b.md)", "lesson.md:7: the link `b.md` leads to b.md, which does not exist"),
    "output of nothing": ("python\nprint(1)", "bash\nls", "lesson.md:13: there is no code before"),
}


@pytest.mark.parametrize(("old", "new", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_fails_with_file_and_line(docs, capsys, old, new, message) -> None:
    docs.write("lesson", GOOD)
    assert docs.main("--check") == 0, capsys.readouterr().out
    docs.write("lesson", GOOD.replace(old, new))
    assert docs.main("--check") == 1
    out = capsys.readouterr().out
    assert f"{docs.source}/en/{message}" in out
    assert f"{docs.source}/zh-Hans/{message}" in out


def test_a_page_in_one_language_fails_with_file_and_line(docs, capsys) -> None:
    docs.write("lesson", GOOD, "en")
    assert docs.main("--check") == 1
    assert f"{docs.source}/zh-Hans/lesson.md:1: every page exists in en and zh-Hans" in capsys.readouterr().out


def test_a_stale_output_fails_the_run_with_file_and_line(docs) -> None:
    docs.write("lesson", GOOD.replace("output\n1", "output\n2"))
    assert docs.main("--check") == 0
    done = docs.run("lesson")
    assert done.returncode == 1
    assert f"{docs.source}/en/lesson.md:14: the block at line 10 was expected to print `2`" in done.stdout
