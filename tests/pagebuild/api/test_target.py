"""The members of a class, whatever was done to it after it was defined."""

import importlib
from functools import wraps

import pytest

from pagebuild.api.target import Resolver

pytestmark = pytest.mark.slow

SHAPES = {
    "shapes.py": '''"""Shapes."""

__all__ = ["Round", "Shape"]


class Shape:
    """A shape."""

    def area(self) -> float:
        """Return 0."""
        return 0.0


class Round(Shape):
    """A round shape."""

    def turn(self) -> "Round":
        """Return itself."""
        return self
'''
}


def members(resolver: Resolver) -> dict[str, tuple[str, str]]:
    found = resolver.members(resolver.resolve("tinylib.shapes.Round"))
    return {member.name.rpartition(".")[2]: (member.kind, member.qualname) for member in found}


def test_a_method_that_another_library_wraps_stays_with_the_class_that_defines_it(make_library) -> None:
    resolver = Resolver(make_library(SHAPES))
    expected = {"area": ("method", "Shape.area"), "turn": ("method", "Round.turn")}
    assert members(resolver) == expected
    shapes = importlib.import_module("tinylib.shapes")
    written = shapes.Round.area

    @wraps(written)
    def hooked(*args: object) -> float:
        return written(*args)

    shapes.Round.area = hooked  # as torch does with the step of each class of optimizers
    assert members(resolver) == expected
    member = next(one for one in resolver.members(resolver.resolve("tinylib.shapes.Round")) if one.kind == "method")
    assert resolver.node(member) is not None
