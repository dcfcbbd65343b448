"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import colossal

MODULES = ["colossal", *(module.name for module in pkgutil.walk_packages(colossal.__path__, "colossal."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, capsys) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed, capsys.readouterr().out


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) > 25
