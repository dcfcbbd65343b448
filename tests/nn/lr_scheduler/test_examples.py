"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import inspect

import pytest

from colossal.nn import lr_scheduler


@pytest.mark.parametrize("name", lr_scheduler.__all__)
def test_the_example_prints_what_it_says(name: str) -> None:
    cls = getattr(lr_scheduler, name)
    [example] = doctest.DocTestFinder(recurse=False).find(cls, name, module=importlib.import_module(cls.__module__))
    assert len(example.examples) >= 4
    result = doctest.DocTestRunner(verbose=False).run(example)
    assert result.failed == 0


@pytest.mark.parametrize("name", lr_scheduler.__all__)
def test_every_argument_is_documented(name: str) -> None:
    cls = getattr(lr_scheduler, name)
    arguments = inspect.cleandoc(cls.__doc__).split("Args:")[1].split("Raises:")[0]
    for parameter in list(inspect.signature(cls).parameters):
        assert f"    {parameter}: " in arguments
