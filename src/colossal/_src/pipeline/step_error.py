"""Which rank ended a step of a pipeline by an exception, for the ranks that wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from textwrap import shorten
from typing import Any, cast, final

from torch import distributed as dist

from colossal.errors import CommunicationError


@final
class StepError:
    """The first exception that ended a step, in the store that all ranks see.

    A rank in whose step a peer is missing knows only which one: often another rank that waits itself. The note says
    where it began.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._key = rank, ""
        with suppress(RuntimeError, ValueError):  # a store without functions, in a dry run, or none
            # A number of its own, so that no rank reads what ended a step of a model boosted before.
            self._key = f"colossal/step_error/{_store().add(f'colossal/pipelines/{rank}', 1)}"

    def write(self, error: BaseException) -> None:
        """Note what ended the step of this rank, unless another one did before."""
        text = f"rank {self._rank} ended it by {type(error).__name__}: {shorten(str(error), 400).rstrip('.')}"
        with suppress(RuntimeError, ValueError):  # the process of the store may have ended
            if self._key:
                _store().compare_set(self._key, "", text)

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Say of a peer that is missing which rank ended the step, if one did.

        Raises:
            CommunicationError: A peer is missing.
        """
        try:
            yield
        except CommunicationError as error:
            if not (text := self._read()):
                raise
            raise CommunicationError(
                f"A step of a pipeline needs all its ranks. Found that {text}. Look at the traceback of that rank."
            ) from error

    def _read(self) -> str:
        with suppress(RuntimeError, ValueError):
            if self._key and _store().check([self._key]):
                return cast("str", _store().get(self._key).decode())
        return ""


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way)
