"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import linecache
import pkgutil

import pytest
from docstring_examples import find_examples

import colossal

MODULES = ["colossal", *(module.name for module in pkgutil.walk_packages(colossal.__path__, "colossal."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, capsys) -> None:
    runner = doctest.DocTestRunner()
    linecache.clearcache()  # of which the runner asks before each example whether its files are still the same
    for test in find_examples(importlib.import_module(name)):
        runner.run(test)
    assert not runner.failures, capsys.readouterr().out


@pytest.mark.slow
def test_there_are_examples() -> None:
    found = [test for name in MODULES for test in find_examples(importlib.import_module(name)) if test.examples]
    assert len(found) > 25
