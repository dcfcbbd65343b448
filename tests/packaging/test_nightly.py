"""Versions between two releases."""

import importlib.util
from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.version import Version

import colossal

_SPEC = importlib.util.spec_from_file_location("wheels", Path(__file__).with_name("wheels.py"))
assert _SPEC
assert _SPEC.loader
wheels = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wheels)
DAY = datetime(2026, 11, 23, tzinfo=UTC)


def test_a_nightly_version_has_the_day() -> None:
    assert wheels.nightly("0.2.0.dev0", DAY) == "0.2.0.dev20261123"


def test_it_lies_between_the_sources_and_the_release() -> None:
    assert Version("0.1.0") < Version("0.2.0.dev0") < Version(wheels.nightly("0.2.0.dev0", DAY)) < Version("0.2.0")


def test_the_sources_of_a_release_have_none() -> None:
    with pytest.raises(ValueError, match=r"Found 0\.2\.0: set the next one"):
        wheels.nightly("0.2.0", DAY)


def test_the_version_of_the_library_is_found() -> None:
    text = Path(colossal.__file__).read_text(encoding="utf-8")
    assert wheels.VERSION.findall(text) == [colossal.__version__]
