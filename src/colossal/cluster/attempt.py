# pyright: reportPrivateImportUsage=false
"""One of several worlds that the same torchrun starts, one after the other.

[Note: a store outlives a world] torchrun keeps one store for all its restarts. A world that failed left the addresses
of its processes there, under the same names that the next one uses. Who reads one of those too early calls a process
that is dead, and fails in turn. So each world gets a part of the store of its own. Its number is agreed on, because no
variable holds one: TORCHELASTIC_RESTART_COUNT differs between nodes as soon as only one of them lost a rank.
"""

import time
import uuid

from torch import distributed as dist

from colossal.errors import LaunchError

_PAUSE_SECONDS = 0.01


def enter_attempt(store: dist.Store, rank: int, world_size: int, seconds: float) -> dist.Store:
    """Return the part of torchrun's store that belongs to the world which forms now.

    Rank 0 counts the worlds, and tells the number to every process that greets it. A greeting of a process that is dead
    is answered in vain: what counts is that the living one thanks for its answer.

    Raises:
        LaunchError: A process did not come in time.
    """
    halls = dist.PrefixStore("colossal/attempt", store)
    if rank == 0:
        number = halls.add("number", 1)
        _receive_all(halls, number, world_size, seconds)
    else:
        greeting = uuid.uuid4().hex
        halls.set(f"greeting {rank}", greeting)
        number = int(halls.get(greeting))
        halls.set(f"thanks {number} {rank}", "")
    return dist.PrefixStore(f"colossal/attempt {number}", store)


def _receive_all(halls: dist.Store, number: int, world_size: int, seconds: float) -> None:
    missing, answered = set(range(1, world_size)), set[bytes]()
    deadline = time.monotonic() + seconds
    while missing:
        for rank in [rank for rank in missing if halls.check([f"greeting {rank}"])]:
            greeting = halls.get(f"greeting {rank}")
            if greeting not in answered:
                halls.set(greeting.decode(), str(number))
                answered.add(greeting)
            if halls.check([f"thanks {number} {rank}"]):
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise LaunchError(
                f"All {world_size} processes must come within {seconds:g} s. Found no rank {sorted(missing)}. "
                "Look for the first error among the other ranks, or pass a larger timeout_seconds."
            )
        if missing:
            time.sleep(_PAUSE_SECONDS)
