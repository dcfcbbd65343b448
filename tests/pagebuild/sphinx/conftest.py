"""What the Sphinx site must show."""

from pathlib import Path

import pytest

from pagebuild.api.contents import Contents, read_contents
from pagebuild.api.inventory import Inventory
from pagebuild.api.library import Library
from pagebuild.api.target import Resolver

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def contents() -> Contents:
    """The pages of the project's own reference."""
    return read_contents(Library(ROOT, ROOT / "src" / "colossal"))


@pytest.fixture(scope="session")
def inventory() -> Inventory:
    """The documented objects of the project's own package."""
    return Inventory(Resolver(Library(ROOT, ROOT / "src" / "colossal")))
