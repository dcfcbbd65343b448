"""What the README promises is what is tested."""

import re
import shlex
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```shell\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("lang", ["en", "zh-Hans"])
def test_the_lines_of_docker_are_those_of_the_installation_page(lang) -> None:
    _, *docker, _ = commands()
    page = (ROOT / "docs/source" / lang / "get_started/installation.md").read_text(encoding="utf-8").splitlines()
    assert set(docker) <= set(page)
    assert (ROOT / shlex.split(docker[0])[5]).is_file()


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
