"""Where the guards look."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def library(repository: Path) -> Path:
    """The folder of the package ``colossal``."""
    folder = repository / "src" / "colossal"
    assert (folder / "errors.py").is_file(), "a guard that looks into an empty folder finds nothing"
    return folder
