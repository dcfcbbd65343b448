"""How long files and functions may be.

A file counts with everything in it. A function counts from its ``def`` line to its last line, decorators left out: the
ceiling counts its docstring, the mean does not, so that nobody saves on documentation. A function inside a function
counts for itself and as part of the outer one.
"""

import ast
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

FILE_CEILING = 400
LONG_FILE_CEILING = 600
FILE_MEDIAN = 150
FUNCTION_CEILING = 60
FUNCTION_MEAN = 15
DOCSTRING_SHARE = 0.25  # of the lines of the library: those of exported objects are long, those of the others are not

LONG_FILES: dict[str, str] = {}  # path from the root of the repository -> why one noun needs more than 400 lines
GUARDED = ("src", "doctest")


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_files(root: Path, folder: Path, allowed: Mapping[str, str]) -> Iterator[str]:
    for path in sources(folder):
        name, lines = path.relative_to(root).as_posix(), line_count(path)
        ceiling = LONG_FILE_CEILING if name in allowed else FILE_CEILING
        if lines > ceiling:
            yield f"{name} has {lines} lines, more than {ceiling}: give its second noun a file of its own"


def stale_allowances(root: Path, allowed: Mapping[str, str]) -> Iterator[str]:
    for name, reason in allowed.items():
        if not reason.strip():
            yield f"{name} is allowed to be long without a reason"
        if not (root / name).is_file() or line_count(root / name) <= FILE_CEILING:
            yield f"{name} no longer needs its place in the allow-list"


def median_length(folder: Path) -> float:
    """The median over the files that are not merely the door of a package."""
    return statistics.median([line_count(path) for path in sources(folder) if path.name != "__init__.py"] or [0])


def functions(folder: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sources(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path.relative_to(folder)}:{node.lineno} {node.name}", node


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def length_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return length(node) - (length(node.body[0]) if ast.get_docstring(node) is not None else 0)


def long_functions(folder: Path) -> Iterator[str]:
    for where, node in functions(folder):
        if length(node) > FUNCTION_CEILING:
            yield f"{where} has {length(node)} lines, more than {FUNCTION_CEILING}: name its parts"


def mean_function(folder: Path) -> float:
    return statistics.fmean([length_without_docstring(node) for _, node in functions(folder)] or [0])


def docstring_share(folder: Path) -> float:
    """How many of all lines docstrings take; blank lines in them do not count."""
    texts = [path.read_text(encoding="utf-8") for path in sources(folder)]
    docstrings = [
        ast.get_docstring(node) or ""
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    documented = sum(1 for docstring in docstrings for line in docstring.splitlines() if line.strip())
    return documented / max(sum(len(text.splitlines()) for text in texts), 1)


# ------------------------------------------------------------------------------------------ the repository


@pytest.mark.parametrize("folder", GUARDED)
def test_no_file_is_too_long(folder: str, repository: Path) -> None:
    violations = list(long_files(repository, repository / folder, LONG_FILES))
    assert not violations, "\n".join(violations)


def test_every_allowance_is_needed(repository: Path) -> None:
    violations = list(stale_allowances(repository, LONG_FILES))
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("folder", GUARDED)
def test_the_median_file_is_short(folder: str, repository: Path) -> None:
    assert sources(repository / folder), "nothing to measure"
    assert median_length(repository / folder) <= FILE_MEDIAN


@pytest.mark.parametrize("folder", GUARDED)
def test_no_function_is_too_long(folder: str, repository: Path) -> None:
    violations = list(long_functions(repository / folder))
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("folder", GUARDED)
def test_the_mean_function_is_short(folder: str, repository: Path) -> None:
    assert mean_function(repository / folder) <= FUNCTION_MEAN


@pytest.mark.parametrize("folder", GUARDED)
def test_docstrings_leave_room_for_code(folder: str, repository: Path) -> None:
    assert docstring_share(repository / folder) <= DOCSTRING_SHARE


# ------------------------------------------------------------------------------------------ the guard itself


def function_of(lines: int, docstring_lines: int = 0) -> str:
    docstring = ['    """Say.', *["    more"] * (docstring_lines - 2), '    """'] if docstring_lines else []
    body = ["    x = 1"] * (lines - 1 - len(docstring))
    return "\n".join(["def f():", *docstring, *body]) + "\n"


@pytest.mark.parametrize(
    ("lines", "allowed", "found"), [(400, 0, 0), (401, 0, 1), (401, 1, 0), (600, 1, 0), (601, 1, 1)]
)
def test_finds_a_long_file(lines: int, allowed: int, found: int, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * lines, encoding="utf-8")
    assert len(list(long_files(tmp_path, tmp_path, {"a.py": "reason"} if allowed else {}))) == found


def test_finds_a_stale_allowance(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 500, encoding="utf-8")
    (tmp_path / "short.py").write_text("x = 1\n", encoding="utf-8")
    assert not list(stale_allowances(tmp_path, {"long.py": "one table"}))
    assert len(list(stale_allowances(tmp_path, {"long.py": " ", "short.py": "reason", "gone.py": "reason"}))) == 3


def test_the_median_leaves_doors_out(tmp_path: Path) -> None:
    for name, lines in {"a.py": 10, "b.py": 200, "c.py": 300, "__init__.py": 1, "x/__init__.py": 1}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * lines, encoding="utf-8")
    assert median_length(tmp_path) == 200


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (function_of(60), 0),
        (function_of(61), 1),
        (function_of(61, docstring_lines=40), 1),
        ("@decorator\n" + function_of(60), 0),
        ("async " + function_of(61), 1),
        ("class A:\n    " + function_of(61).replace("\n", "\n    "), 1),
    ],
)
def test_finds_a_long_function(source: str, found: int, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert len(list(long_functions(tmp_path))) == found


def test_the_mean_leaves_docstrings_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(function_of(50, docstring_lines=40) + function_of(30), encoding="utf-8")
    assert mean_function(tmp_path) == 20


def test_nothing_is_short(tmp_path: Path) -> None:
    assert median_length(tmp_path) == 0
    assert mean_function(tmp_path) == 0


def test_the_share_of_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(function_of(8, docstring_lines=4) + '"""A string."""\n' * 8, encoding="utf-8")
    assert docstring_share(tmp_path) == 3 / 16
