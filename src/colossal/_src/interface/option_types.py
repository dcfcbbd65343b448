"""What an option takes: text of a command line or of YAML is not converted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, isnan
from types import NoneType
from typing import Any, final, get_args


def is_integer(value: Any, at_least: float = -inf) -> bool:
    """Whether a value is an integer of Python, from a least one on; a flag is none."""
    return isinstance(value, int) and is_number(value, at_least)


def is_number(value: Any, at_least: float = -inf) -> bool:
    """Whether a value is a number of Python, from a least one on; a flag is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= at_least


@final
@dataclass(frozen=True)
class OptionType:
    """A type that several Python types can stand for, such as those of NumPy."""

    noun: str
    is_one: Callable[[Any], bool]
    conversion: str  # of text
    is_optional: bool = False

    def fits(self, value: Any) -> bool:
        """Whether a value can be used."""
        return self.is_optional if value is None else not isinstance(value, str | bytes) and self.is_one(value)

    def advice(self, name: str, value: Any) -> str:
        """Say what to pass instead."""
        if isinstance(value, str):
            return f"A command line and YAML may give text: pass {self.conversion.format(name)}."
        return "Leave it out for its default." if value is None else f"Pass {self.noun}."


def _is_flag(value: Any) -> bool:
    return (
        isinstance(value, bool) or type(value).__name__ in ("bool_", "bool") or (type(value) is int and value in (0, 1))
    )


def _makes_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isnan(value)


def _makes_integer(value: Any) -> bool:
    return hasattr(value, "__index__")


_TYPES: Mapping[Any, OptionType] = {
    bool: OptionType("True or False", _is_flag, "{} == 'true', as bool('false') is True"),
    int: OptionType("an integer", _makes_integer, "int({})"),
    float: OptionType("a number", _makes_number, "float({})"),
}


def option_type(annotation: Any) -> OptionType | None:
    """Return what an annotation asks for, if that is a flag or a number, or None in its place."""
    kinds = [each for each in get_args(annotation) if each is not NoneType] or [annotation]
    found = _TYPES.get(kinds[0]) if len(kinds) == 1 and isinstance(kinds[0], type) else None
    return found if found is None or kinds == [annotation] else replace(found, is_optional=True)
