"""What the older documentation imports and calls is there, with the documented arguments; the table says what is not.

`python tests/legacy/test_documented_names.py` prints how many rows of the table are there, and what is not.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from colossal.errors import UnsupportedError

HERE = Path(__file__).parent
KINDS = {"!": "refused", "?": "missing", "-": "elsewhere"}


class Row(NamedTuple):
    """A row of the table."""

    path: str  # of what is imported, and then of its attributes
    kind: str
    text: str  # the arguments, or what is said of the row


def read_table() -> list[Row]:
    rows: list[Row] = []
    for line in (HERE / "documented_names.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("# ") and line != "#":
            kind = KINDS.get(line[0], "there")
            path, _, text = line.lstrip("".join(KINDS)).partition(":")
            rows.append(Row(path, kind, text.strip()))
    return rows


TABLE = read_table()


def import_path(path: str) -> Any:
    """What ``from MODULE import NAME``, or ``import MODULE``, gives."""
    module, _, name = path.rpartition(".")
    is_called = name.endswith("()")
    try:
        found: Any = getattr(importlib.import_module(module), name.removesuffix("()"))
    except (AttributeError, ModuleNotFoundError):
        found = importlib.import_module(path)
    return found() if is_called else found


def resolve(path: str) -> Any:
    first, *attributes = path.split("/")
    found = import_path(first)
    for name in attributes:
        found = getattr(found, name)
    return found


def parameters_of(found: Any) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of a call, and whether it takes others too: those of a class are of all its constructors."""
    listed = [*inspect.signature(found).parameters.values()]
    is_open = any(each.kind is each.VAR_KEYWORD for each in listed)
    if is_open and inspect.isclass(found):
        inherited = [kind.__init__ for kind in inspect.getmro(found)[1:] if "__init__" in vars(kind)]
        taken = {each.name: each for init in inherited for each in [*inspect.signature(init).parameters.values()][1:]}
        for init in inherited:  # the first of the constructors that names its arguments has their order
            own = [*inspect.signature(init).parameters.values()][1:]
            if not any(each.kind is each.VAR_POSITIONAL for each in own):
                taken = {each.name: each for each in own} | taken
                break
        return [*({each.name: each for each in listed} | taken).values()], False
    return listed, is_open


def problem_of(row: Row) -> str:
    """What is wrong with the documented arguments; empty if nothing is."""
    documented = row.text.split()
    found = resolve(row.path)
    if not documented:
        return ""
    parameters, is_open = parameters_of(found)
    names = [each.name for each in parameters]
    lacking = [name for name in documented if name not in names]
    if lacking and not is_open and not (any(each.kind is each.VAR_POSITIONAL for each in parameters)):
        return f"takes no {', '.join(lacking)}: {inspect.signature(found)}"
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    in_order = [name for name in documented if name in positional]
    if in_order != [name for name in positional if name in documented]:
        return f"takes {positional} in another order"
    return ""


def rows(kind: str) -> list[Any]:
    return [pytest.param(row, id=row.path) for row in TABLE if row.kind == kind]


def test_what_is_there_takes_the_documented_arguments() -> None:
    problems = [f"{row.path} {problem}" for row in TABLE if row.kind == "there" and (problem := problem_of(row))]
    assert problems == []


@pytest.mark.parametrize("row", rows("refused"))
def test_what_is_refused_says_what_to_use(row: Row) -> None:
    with pytest.raises((ImportError, UnsupportedError), match=re.escape(row.text)):
        resolve(row.path)


def test_nothing_is_missing() -> None:
    assert [row.path for row in TABLE if row.kind == "missing"] == []


def test_the_table_has_every_documented_path() -> None:
    documented = (HERE / "documented_paths.txt").read_text(encoding="utf-8").split()
    assert set(documented) - {row.path.partition("/")[0] for row in TABLE} == set()
    elsewhere = [row.path for row in TABLE if row.kind == "elsewhere"]
    kinds = r"auto_parallel|autochunk|\bfx\b|inference|Inference|triton|alpa_dp"
    assert [path for path in elsewhere if not re.search(kinds, path)] == []


def report() -> list[str]:
    """Say how many rows are there, and what is not."""
    counts = {kind: sum(row.kind == kind for row in TABLE) for kind in ("there", *KINDS.values())}
    wrong = [row for row in TABLE if row.kind == "there" and problem_of(row)]
    others = [row for row in TABLE if row.kind in ("refused", "missing")]
    return [
        f"{counts['there'] - len(wrong)} of {len(TABLE)} documented names with their arguments; {counts}",
        *(f"wrong: {row.path} {problem_of(row)}" for row in wrong),
        *(f"{row.kind}: {row.path}: {row.text}" for row in others),
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join([*report(), ""]))
