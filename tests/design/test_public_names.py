"""The public names of every package: each is declared once, and is there.

A package is public unless a part of its path begins with an underscore. It names what it offers in a literal
``__all__``. A module counts if it has an ``__all__``; a module right under the library counts in any case, with the
classes and functions that it defines.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from public_names import LIBRARY, difference, names_of, public_modules

pytestmark = pytest.mark.slow


def unresolved(module: str, names: list[str]) -> Iterator[str]:
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        yield f"{module} cannot be imported: {error}"
        return
    for name in names:
        try:
            getattr(loaded, name)
        except (AttributeError, ImportError) as error:
            yield f"{module}.{name} is declared but missing: {error}"


# ------------------------------------------------------------------------------------------ the library


def test_every_public_package_declares_its_names() -> None:
    silent = [module for module, names in public_modules(LIBRARY).items() if names is None]
    assert not silent, f"without __all__: {silent}"


@pytest.mark.parametrize(("module", "names"), [(m, n) for m, n in public_modules(LIBRARY).items() if n])
def test_every_declared_name_exists_once(module: str, names: list[str]) -> None:
    assert len(names) == len(set(names))
    missing = list(unresolved(module, names))
    assert not missing, "\n".join(missing)


# ------------------------------------------------------------------------------------------ the guard itself


def test_reads_names_without_importing(tmp_path: Path) -> None:
    files = {
        "__init__.py": "__all__ = ['b', 'a']\nraise SystemExit",
        "errors.py": "class Bad: ...\ndef _private(): ...\nasync def go(): ...\nimport os\n",
        "zero/__init__.py": "__all__: tuple[str, ...] = ('x',)",
        "zero/part.py": "class NotPublic: ...",
        "zero/open.py": "__all__ = ['y']",
        "silent/__init__.py": "from a import b",
        "zero/_inner/__init__.py": "__all__ = ['hidden']",
        "_typing.py": "class Hidden: ...",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    assert names_of(tmp_path) == [
        "colossal.errors: Bad",
        "colossal.errors: go",
        "colossal.zero.open: y",
        "colossal.zero: x",
        "colossal: a",
        "colossal: b",
    ]
    assert [module for module, names in public_modules(tmp_path).items() if names is None] == ["colossal.silent"]


def test_shows_what_came_and_what_went() -> None:
    changes = difference(["colossal: a", "colossal: b"], ["colossal: b", "colossal: c"]).splitlines()
    assert "-colossal: a" in changes
    assert "+colossal: c" in changes
    assert not difference(["colossal: a"], ["colossal: a"])


def test_finds_a_name_that_does_not_exist() -> None:
    assert not list(unresolved("json", ["dumps"]))
    assert len(list(unresolved("json", ["dumps", "no_such_name"]))) == 1
    assert len(list(unresolved("no_such_module_at_all", ["x", "y"]))) == 1
