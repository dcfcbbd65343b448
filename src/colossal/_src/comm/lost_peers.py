"""Peers that are lost or late, where torch raises that."""

from types import TracebackType
from typing import final

from torch import distributed as dist

from colossal.errors import CommunicationError


@final
class LostPeerGuard:
    """Turns what torch raises in a collective, or in waiting for one, into a `CommunicationError`.

    On an accelerator most of it is raised nowhere, see `colossal._src.cluster.launch`: its watchdog ends the process.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, dist.DistError):
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CommunicationError(
            f"All ranks of a group must come to its collectives in time. Found on rank {rank}: {reason}. Look for the "
            "first error among the other ranks; where a step may take longer, pass timeout_seconds to launch, or set "
            "COLOSSAL_TIMEOUT_SECONDS."
        ) from error


@final
class CallOfAllRanks:
    """Adds to an error that a peer caused that all ranks make a call: often one was made under ``if rank == 0``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CommunicationError | dist.DistError):
            raise CommunicationError(
                f"All ranks {self._what} together. Found that a peer did not come, or called something else. Call it "
                f"on all ranks, not on some of them, as under `if rank == 0`. {error}"
            ) from error
