"""``requirements/*.txt`` say what ``pyproject.toml`` says, which is where requirements are kept.

Changed some there? ``python tests/packaging/test_requirements.py`` writes the files anew.
"""

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "# Written from pyproject.toml by tests/packaging/test_requirements.py; do not edit.\n"


def expand(requirements: Iterable[Any], extras: dict[str, list[str]], groups: dict[str, list[Any]]) -> Iterator[str]:
    """Replace extras of the project itself, and groups that are included, by what they stand for."""
    for requirement in requirements:
        if isinstance(requirement, dict):
            yield from expand(groups[requirement["include-group"]], extras, groups)
        elif requirement.startswith("colossal["):
            for extra in requirement.removeprefix("colossal[").removesuffix("]").split(","):
                yield from expand(extras[extra], extras, groups)
        else:
            yield requirement


def files(pyproject: dict[str, Any]) -> dict[str, str]:
    """What each file must hold."""
    project = pyproject["project"]
    extras, groups = project["optional-dependencies"], pyproject["dependency-groups"]
    wanted = {
        "requirements.txt": project["dependencies"],
        "requirements-test.txt": ["-r requirements.txt", *expand(["colossal[all]", *groups["tests"]], extras, groups)],
    }
    return {name: HEAD + "".join(f"{line}\n" for line in dict.fromkeys(lines)) for name, lines in wanted.items()}


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", files(PYPROJECT))
def test_the_file_is_that_of_the_project(name) -> None:
    assert (ROOT / "requirements" / name).read_text(encoding="utf-8") == files(PYPROJECT)[name], __doc__


def test_no_other_file_of_requirements_is_kept() -> None:
    assert {path.name for path in (ROOT / "requirements").iterdir()} == set(files(PYPROJECT))


def test_extras_and_groups_are_replaced_by_what_they_hold() -> None:
    planted = {
        "project": {
            "dependencies": ["a>=1"],
            "optional-dependencies": {"all": ["colossal[x,y]"], "x": ["b"], "y": ["c"]},
        },
        "dependency-groups": {"tests": ["d", {"include-group": "more"}], "more": ["b", "e"]},
    }
    assert files(planted) == {
        "requirements.txt": f"{HEAD}a>=1\n",
        "requirements-test.txt": f"{HEAD}-r requirements.txt\nb\nc\nd\ne\n",
    }


if __name__ == "__main__":
    for file, text in files(PYPROJECT).items():
        (ROOT / "requirements" / file).write_text(text, encoding="utf-8")
