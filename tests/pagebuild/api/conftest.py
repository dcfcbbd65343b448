"""A made-up library, and the reference of the real one, which is read once."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagebuild.api.command import pages_of
from pagebuild.api.inventory import Inventory
from pagebuild.api.library import Library
from pagebuild.api.reference import Reference, build_reference
from pagebuild.api.target import Resolver

ROOT = Path(__file__).resolve().parents[3]
SHARED, OWN = "toylib", "tinylib"
MakeLibrary = Callable[[dict[str, str]], Library]


@contextmanager
def importable(folder: Path, name: str) -> Iterator[None]:
    """Lets the modules below a folder be imported, and forgets them afterwards."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in [one for one in sys.modules if one.partition(".")[0] == name]:
            del sys.modules[module]


def write_library(root: Path, name: str, files: dict[str, str]) -> Library:
    for file, text in {"__init__.py": '"""A toy."""\n\n__all__ = []\n', **files}.items():
        path = root / "src" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Library(root, root / "src" / name)


@pytest.fixture
def make_library(tmp_path: Path) -> Iterator[MakeLibrary]:
    """Writes the library `tinylib` from the texts of its files; it can be imported until the test ends."""
    with importable(tmp_path / "src", OWN):
        yield lambda files: write_library(tmp_path, OWN, files)


@pytest.fixture(scope="module")
def make_shared_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLibrary]:
    """Writes the library `toylib`, which can be imported until the tests of the module have ended."""
    root = tmp_path_factory.mktemp("library")
    with importable(root / "src", SHARED):
        yield lambda files: write_library(root, SHARED, files)


@pytest.fixture(scope="session")
def inventory() -> Inventory:
    """The documented objects of the project's own package."""
    return Inventory(Resolver(Library(ROOT, ROOT / "src" / "colossal")))


@pytest.fixture(scope="session")
def reference(inventory: Inventory) -> Reference:
    """The reference of the project's own package, with the hooks of all pages."""
    return build_reference(inventory.resolver.library, pages_of(ROOT / "docs" / "source"))
