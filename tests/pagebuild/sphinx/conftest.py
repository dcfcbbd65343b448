"""What the Sphinx site must show."""

from pathlib import Path

import pytest

from pagebuild.api.inventory import Inventory
from pagebuild.api.library import Library
from pagebuild.api.target import Resolver

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def library_modules() -> tuple[str, ...]:
    """The public modules of the project's own package."""
    return tuple(Library(ROOT, ROOT / "src" / "colossal").modules)


@pytest.fixture(scope="session")
def inventory() -> Inventory:
    """The documented objects of the project's own package."""
    return Inventory(Resolver(Library(ROOT, ROOT / "src" / "colossal")))
