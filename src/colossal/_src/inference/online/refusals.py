"""Why a request has no answer although it is a valid one."""

from colossal.errors import ColossalError


class QueueFullError(ColossalError, RuntimeError):
    """As many requests wait as may wait.

    Example:
        >>> from colossal.inference import QueueFullError
        >>> issubclass(QueueFullError, RuntimeError)
        True
    """


class DeadlineError(ColossalError, TimeoutError):
    """A request was not finished in its time."""


class UnavailableError(ColossalError, RuntimeError):
    """The engine takes no requests any more: it is stopping, or a step has failed."""
