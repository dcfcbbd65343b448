"""What the README promises is what is tested."""

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```shell\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_one_line_runs_the_main_job_and_one_line_runs_the_tests() -> None:
    main, *docker, tests = commands()
    assert main.startswith("python3 -m venv .venv && ")
    assert shlex.split(main)[-2:] == ["docs_test.py", "booster_api"]
    assert tests.startswith("python3 -m venv .venv && ")
    assert shlex.split(tests)[-3:] == [".venv/bin/nox", "-s", "tests"]
    assert [shlex.split(line)[:2] for line in docker] == [["docker", "build"], ["docker", "run"]]


@pytest.mark.parametrize("lang", ["en", "zh-Hans"])
def test_the_lines_of_docker_are_those_of_the_installation_page(lang) -> None:
    _, *docker, _ = commands()
    page = (ROOT / "docs/source" / lang / "get_started/installation.md").read_text(encoding="utf-8").splitlines()
    assert set(docker) <= set(page)
    assert (ROOT / shlex.split(docker[0])[5]).is_file()


def test_ci_runs_the_readmes_test_command_and_every_other_session_that_nox_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    tests = commands()[-1]
    assert tests in script
    (listed,) = re.findall(r"^SESSIONS = (\[.*?\])", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    sessions = ast.literal_eval(listed)
    others = {word for line in script[script.index(tests) + 1 :] for word in line.split()}
    assert "tests" in sessions
    assert set(sessions) - {"tests", "quick"} <= others  # quick runs some of what they run


def test_the_program_is_part_of_a_page_that_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    page = (ROOT / "docs/source/en/concepts/colossal_overview.md").read_text(encoding="utf-8")
    assert program in page


def test_the_program_is_the_quickstart_in_one_piece() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert program == (ROOT / "examples/quickstart.py").read_text(encoding="utf-8")
    assert len(program.splitlines()) <= 40


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link) -> None:
    assert link.startswith("https://") or (ROOT / link).exists()
