"""Attributes that are computed when they are first read, by code that may wait for other ranks."""

from functools import cached_property
from typing import Any, TypeVar, overload

__all__ = ["cached_by_rank"]

T = TypeVar("T")


class cached_by_rank(cached_property[T]):  # noqa: N801 (as that of functools)
    """A `cached_property` without the lock of Python 3.11, which all objects of a class share.

    Ranks that are threads would wait for each other: one holds the lock and waits for the others in a collective.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> "cached_by_rank[T]": ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        assert self.attrname is not None
        value = vars(instance)[self.attrname] = self.func(instance)
        return value
