"""Run code that must raise, and show its error."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from torch import distributed as dist

ErrorT = TypeVar("ErrorT", bound=Exception)


def expect_error(*types: type[ErrorT]) -> AbstractContextManager[list[ErrorT]]:
    """Run code that must raise on all ranks, and print ``TypeName: message`` on rank 0.

    Args:
        *types: The errors that are expected, their subclasses included. Others pass through.

    Returns:
        A context manager; `as` takes a list, empty at first, that holds the error afterwards.

    Raises:
        TypeError: No types are given, or one that would take the error of a failing check too.
        AssertionError: When the code ends without an error, on each rank where it does.

    Example:
        >>> from colossal.errors import ConfigError
        >>> from colossal.testing import expect_error
        >>> with expect_error(ConfigError) as errors:
        ...     raise ConfigError("stage must be 1 or 2. Found 3.")
        ConfigError: stage must be 1 or 2. Found 3.
        >>> assert "Found 3" in str(errors[0])
    """
    if not types or any(issubclass(AssertionError, each) or issubclass(each, AssertionError) for each in types):
        raise TypeError(
            "expect_error takes the types of the errors that are expected here, and none that a failing check raises. "
            f"Found {[each.__name__ for each in types]}. Name the error, such as expect_error(ConfigError)."
        )
    return _ExpectedError(types)


class _ExpectedError(AbstractContextManager[list[ErrorT]], Generic[ErrorT]):
    """Takes an error of the given types, and raises where none comes."""

    def __init__(self, types: tuple[type[ErrorT], ...]) -> None:
        self._types, self._errors = types, list[ErrorT]()

    def __enter__(self) -> list[ErrorT]:
        return self._errors

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            names = " or ".join(each.__name__ for each in self._types)
            raise AssertionError(f"This must raise {names}. Found that it ended without an error.")
        if not isinstance(error, self._types):
            return False
        self._errors.append(error.with_traceback(None))  # a traceback keeps the tensors of its frames
        if is_rank_0():
            # without the folder, which differs from run to run
            print(f"{type(error).__name__}: {error}".replace(f"{Path.cwd()}/", ""), flush=True)  # noqa: T201
        return True


def is_rank_0() -> bool:
    """Whether this process has rank 0, by its process group, or else by the launcher."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0
