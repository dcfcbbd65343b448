"""Which tests `.ci/run` leaves out, and when it may."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unchanged import INPUTS, STORE

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "tests/helpers"), str(ROOT / "doctest")]
CONFTEST = """
from unchanged import Unchanged


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true")


def pytest_configure(config):
    config.addinivalue_line("markers", "project: reads the project")
    config.pluginmanager.register(Unchanged(config, {"tests/tool": ("tool", "tests/tool")}))
"""
TESTS = """
import pytest
from pathlib import Path


def test_tool():
    assert Path("tool/number").read_text() != "3"


@pytest.mark.project
def test_of_the_project():
    pass
"""


class Project:
    """A repository with a tool, its tests, and others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = {"tests/conftest.py": CONFTEST, "tests/tool/test_tool.py": TESTS, "tool/number": "1"}
        files |= {"tests/other/test_other.py": "def test_other():\n    pass\n", "pytest.ini": "[pytest]\n"}
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)

    def run(self, *words: str, check: str = "") -> str:
        """Run the tests, and return the counts of the last line."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "COLOSSAL_CHECK": check}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "no:cacheprovider", *(words or ["tests"])]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        assert not done.stderr, done.stderr
        return done.stdout.splitlines()[-1].partition(" in ")[0]


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


def test_what_passed_is_left_out_until_an_input_changes(project) -> None:
    assert project.run(check="changed") == "3 passed"
    assert project.run("tests", "--record") == "3 passed"
    assert project.run() == "3 passed"
    assert project.run("-n", "2", check="changed") == "2 passed"
    (project.root / "tests/other/test_more.py").write_text("def test_more():\n    pass\n")
    assert project.run(check="changed") == "3 passed, 1 deselected"
    (project.root / "tool/more").write_text("an input that git does not know yet")
    assert project.run(check="changed") == "4 passed"


@pytest.mark.parametrize(
    "words", [["tests", "-k", "tool"], ["tests", "-m", "not project"], ["tests/other"], ["tests/tool/test_tool.py"]]
)
def test_a_part_of_the_tests_proves_nothing(project, words) -> None:
    project.run(*words, "--record")
    assert json.loads((project.root / STORE).read_text()) == {}


def test_a_failure_is_not_recorded_and_not_forgotten(project) -> None:
    (project.root / "tool/number").write_text("3")
    assert project.run("tests", "--record") == "1 failed, 2 passed"
    assert project.run(check="changed") == "1 failed, 2 passed"


def test_what_tests_depend_on_is_there() -> None:
    missing = {name for names in INPUTS.values() for name in names if not (ROOT / name).exists()}
    assert not missing
