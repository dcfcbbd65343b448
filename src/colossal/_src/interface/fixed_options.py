"""Options that a constructor has read: to set one afterwards would have no effect, and is refused."""

import inspect
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from colossal._src.interface.flat_values import is_program
from colossal.errors import ConfigError


class FixedOptions:
    """Refuses that a program sets a parameter of the constructor on what it has constructed."""

    if not TYPE_CHECKING:  # a type checker reports what a class does not have, unless it has this method

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute.

            Raises:
                ConfigError: It is an option, set by a program; the message says what to do.
            """
            if is_program(sys._getframe(1)):  # noqa: SLF001 (the only way to find the caller)
                _check(type(self), name, value)
            super().__setattr__(name, value)


def _check(kind: type, name: str, value: Any) -> None:
    if name in _options_of(kind):
        raise ConfigError(
            f"The options of a {kind.__name__} are those that its constructor got. Found {name}={value!r} set "
            f"afterwards, which nothing would read. Pass {kind.__name__}({name}=...), and boost with that; to change "
            "it during a run, save by booster.save, and load the checkpoint into what is boosted with it."
        )


@cache
def _options_of(kind: type) -> frozenset[str]:
    """Return what constructors of this library take: a subclass of a program may keep what its own one takes."""
    classes = [each for each in kind.__mro__ if "__init__" in vars(each) and each.__module__.startswith("colossal.")]
    return frozenset(name for each in classes for name in inspect.signature(each).parameters)
