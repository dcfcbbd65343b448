"""How long files and functions may be, and how much a class may hold.

``python tests/design/test_sizes.py`` lists the files and classes that are over a limit: look whether they hold a second
idea, and leave them if not. A file or a class of twice that fails; so does a function over its limit.

A file counts with everything in it. A class counts the names of its methods, and the attributes that they set on
``self``. A function counts from its ``def`` line to its last line, decorators left out: the ceiling counts its
docstring, the mean does not, so that nobody saves on documentation. A function inside a function counts for itself and
as part of the outer one.
"""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE_LINES = 400
CLASS_METHODS = 25
CLASS_ATTRIBUTES = 20
FILE_MEDIAN = 150
TOO_MUCH = 2  # times the lines of a file, or what a class holds, fails
FUNCTION_CEILING = 60
FUNCTION_MEAN = 15
DOCSTRING_SHARE = 0.25  # of the lines of the library: those of exported objects are long, those of the others are not

GUARDED = ("src", "doctest")


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def long_files(root: Path, folder: Path, times: int = 1) -> Iterator[str]:
    """The files over the limit, or over some multiple of it."""
    for path in sources(folder):
        if (lines := line_count(path)) > times * FILE_LINES:
            yield f"{path.relative_to(root)} has {lines} lines, more than {times * FILE_LINES}"


def large_classes(root: Path, folder: Path, times: int = 1) -> Iterator[str]:
    """The classes over a limit, or over some multiple of it."""
    for path in sources(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where = f"{path.relative_to(root)}:{node.lineno} {node.name}"
                for what, names, limit in (
                    ("methods", methods(node), times * CLASS_METHODS),
                    ("attributes", attributes(node), times * CLASS_ATTRIBUTES),
                ):
                    if len(names) > limit:
                        yield f"{where} has {len(names)} {what}, more than {limit}"


def methods(node: ast.ClassDef) -> set[str]:
    """The names of the methods of a class: a property and its setter are one, and so are overloads."""
    return {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}


def attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that the methods of a class set on `self`."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def over_limits(root: Path, folder: Path, times: int = 1) -> Iterator[str]:
    yield from long_files(root, folder, times)
    yield from large_classes(root, folder, times)


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
def test_no_file_and_no_class_is_far_too_large(folder: str, repository: Path) -> None:
    assert sources(repository / folder), "nothing to measure"
    violations = [*over_limits(repository, repository / folder, TOO_MUCH)]
    assert not violations, "\n".join(violations)
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


@pytest.mark.parametrize(("lines", "times", "found"), [(400, 1, 0), (401, 1, 1), (401, 2, 0), (800, 2, 0), (801, 2, 1)])
def test_finds_a_long_file(lines: int, times: int, found: int, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * lines, encoding="utf-8")
    assert len(list(over_limits(tmp_path, tmp_path, times))) == found


def class_of(num_methods: int, num_attributes: int) -> str:
    """A class whose first method sets attributes, each twice, and which has a property with a setter."""
    names = ", ".join(f"self.a{number}" for number in range(num_attributes))
    setting = [f"        {names} = other.b = range({num_attributes})"] * 2
    head = ["class A:", "    def f(self, other):", *setting, "    @property", "    def p(self): ..."]
    rest = [f"    async def f{number}(self): ..." for number in range(num_methods - 2)]
    return "\n".join([*head, "    @p.setter", "    def p(self, value): ...", *rest]) + "\n"


@pytest.mark.parametrize(
    ("num_methods", "num_attributes", "times", "found"),
    [
        (25, 20, 1, 0),
        (26, 20, 1, 1),
        (25, 21, 1, 1),
        (26, 21, 1, 2),
        (50, 40, 2, 0),
        (51, 40, 2, 1),
        (50, 41, 2, 1),
    ],
)
def test_finds_a_large_class(num_methods: int, num_attributes: int, times: int, found: int, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(class_of(num_methods, num_attributes), encoding="utf-8")
    violations = list(over_limits(tmp_path, tmp_path, times))
    assert len(violations) == found
    assert all(violation.startswith("a.py:1 A has ") for violation in violations)


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


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    for guarded in GUARDED:
        print(*over_limits(root, root / guarded), sep="\n")  # noqa: T201 (a list for the terminal)
        print(f"the median file of {guarded} has {median_length(root / guarded):.0f} lines; {FILE_MEDIAN} are enough")  # noqa: T201
