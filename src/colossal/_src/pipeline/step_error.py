"""Which rank ended a step of a pipeline by an exception, for the ranks that wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from textwrap import shorten
from typing import Any, cast, final

from torch import distributed as dist

from colossal._src.cluster import ParallelMesh
from colossal.errors import CommunicationError

# The store of a dry run has no functions, the process of the store may have ended, or the group was destroyed.
_NO_STORE = (RuntimeError, ValueError, KeyError)


@final
class StepError:
    """The exception that ended the last step of a pipeline, in the store of the process group of its ranks.

    A rank in whose step a peer is missing knows only which one: often another rank that waits itself. The note says
    where it began. It is never out of date: after an exception a pipeline takes no further step, and one that is
    constructed anew has another number, by the count of those that the ranks of the group constructed together.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh, self._key = mesh, ""
        with suppress(*_NO_STORE):
            number = self._store().add(f"colossal/pipelines/{mesh.global_rank}", 1)
            self._key = f"colossal/step_error/{number}"

    def write(self, error: BaseException) -> None:
        """Note what ended the step of this rank, unless another one did before."""
        said = shorten(str(error), 400).rstrip(".")
        text = f"rank {self._mesh.global_rank} ended it by {type(error).__name__}: {said}"
        with suppress(*_NO_STORE):
            if self._key:
                self._store().compare_set(self._key, "", text)

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
        with suppress(*_NO_STORE):
            if self._key and self._store().check([self._key]):
                return cast("str", self._store().get(self._key).decode())
        return ""

    def _store(self) -> Any:
        # not kept: after the process group is destroyed it would keep the port of the store
        return dist.distributed_c10d._get_process_group_store(self._mesh.group("pp"))  # noqa: SLF001 (torch has no public way)
