# pyright: reportPrivateImportUsage=false
"""All processes of a job connect to its store, and agree on the world size.

[Note: a store outlives an attempt] torchrun keeps one store for all its restarts. An attempt that failed left the
addresses of its processes there, under the same keys that the next one uses. A process that reads such an address too
early connects to a dead process, and fails in turn. So each attempt gets its own prefix in the store. The processes
agree on its number, because no variable holds one: TORCHELASTIC_RESTART_COUNT differs between nodes as soon as only one
of them lost a rank.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import final

from torch import distributed as dist

from colossal._src.cluster.process_spec import ProcessSpec
from colossal.errors import LaunchError

FAREWELL_SECONDS = 2.0
"""How long a process that failed waits before it ends, so that the others learn why the rendezvous failed."""

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05


def agree_on_world(store: dist.Store, member: ProcessSpec, seconds: float, *, lasting: bool = False) -> dist.Store:
    """Return the store with the prefix of this attempt to form a process group.

    Every process greets rank 0, which answers with the number of the attempt and the world size. The process replies
    with the world size that it was started with itself. Rank 0 compares these, and reports the outcome to all. A
    greeting of a dead process gets an answer too, which does no harm: only replies count.
    """
    attempts = dist.PrefixStore("colossal/attempt", store)
    number = _receive_all(attempts, member, seconds) if member.rank == 0 else _join(attempts, member, seconds, lasting)
    return dist.PrefixStore(f"colossal/attempt {number}", store)


@final
class _Mailbox:
    """Messages that several processes leave in a store, and one reads."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store, name
        self._unread, self._count = list[int](), 0

    def post(self, message: str) -> None:
        self._store.set(f"{self._name} {self._store.add(self._name, 1)}", message)

    def read(self) -> list[str]:
        """Return the messages that were not read before."""
        count = self._store.add(self._name, 0)
        self._unread += range(self._count + 1, count + 1)
        self._count = count
        arrived = [index for index in self._unread if self._store.check([f"{self._name} {index}"])]
        self._unread = [index for index in self._unread if index not in arrived]
        return [self._store.get(f"{self._name} {index}").decode() for index in arrived]


def _receive_all(attempts: dist.Store, member: ProcessSpec, seconds: float) -> int:
    """Wait, as rank 0, until all others have replied; return the number of the attempt."""
    number, greeted, sizes = attempts.add("number", 1), 0, {0: member.world_size}
    greetings, replies = _Mailbox(attempts, "greetings"), _Mailbox(attempts, f"replies {number}")
    error = ""
    for late in _tries(seconds):
        for greeting in greetings.read():
            attempts.set(greeting, f"{number} {member.world_size}")
            greeted += 1
        sizes |= dict(_two_numbers(reply) for reply in replies.read())
        missing = [str(rank) for rank in range(member.world_size) if rank not in sizes]
        if set(sizes.values()) != {member.world_size}:
            error = _differ(sizes)
        elif missing and late:
            error = (
                f"All {member.world_size} processes must come to {member.address} within {seconds:g} s. Found no rank "
                f"{', '.join(missing)}. Look for the first error among the other ranks, start all with the same host, "
                "port and world_size, or pass a larger timeout_seconds."
            )
        if error or not missing:
            break
    attempts.set("formed", "" if error else str(member.world_size))
    attempts.set(f"verdict {number}", error)
    if error:
        _see_off(_Mailbox(attempts, f"farewells {number}"), greeted)
        raise LaunchError(error)
    return number


def _see_off(farewells: _Mailbox, greeted: int) -> None:
    """Keep the store, which ends with this process, until the others have read why the rendezvous failed."""
    gone = 0
    for _ in _tries(FAREWELL_SECONDS):
        gone += len(farewells.read())
        if gone >= greeted:
            return


def _join(attempts: dist.Store, member: ProcessSpec, seconds: float, lasting: bool) -> int:
    """Greet rank 0, as another rank; return the number of the attempt."""
    greeting = uuid.uuid4().hex
    _Mailbox(attempts, "greetings").post(greeting)
    number, size = _two_numbers(_await_answer(attempts, greeting, member, seconds, lasting))
    _Mailbox(attempts, f"replies {number}").post(f"{member.rank} {member.world_size}")
    # Rank 0 may have started to wait later than this process, and then goes on for longer.
    error = _await_answer(attempts, f"verdict {number}", member, seconds + FAREWELL_SECONDS, lasting=True)
    _Mailbox(attempts, f"farewells {number}").post("")
    if not error and size != member.world_size:  # all ranks were there before the reply was read
        error = _differ({0: size, member.rank: member.world_size})
    if error:
        raise LaunchError(error)
    return number


def _await_answer(attempts: dist.Store, key: str, member: ProcessSpec, seconds: float, lasting: bool) -> str:
    """Wait for what rank 0 writes."""
    for late in _tries(seconds):
        if attempts.check([key]):
            return attempts.get(key).decode()
        formed = attempts.get("formed").decode() if attempts.check(["formed"]) else ""
        if formed not in ("", str(member.world_size)) and (late or not lasting):
            raise LaunchError(_differ({0: int(formed), member.rank: member.world_size}))
    raise LaunchError(
        f"Rank {member.rank} must reach rank 0 at {member.address} within {seconds:g} s. Found its store, and no "
        "answer there. Look for the first error among the other ranks; check that no two processes have the same rank."
    )


def _tries(seconds: float) -> Iterator[bool]:
    """Yield for each try whether it is the last one, with pauses that grow: many processes may ask the same store."""
    deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE_SECONDS
    while time.monotonic() < deadline:
        yield False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
    yield True


def _differ(sizes: Mapping[int, int]) -> str:
    ranks = {size: [str(rank) for rank in sorted(sizes) if sizes[rank] == size] for size in sorted(set(sizes.values()))}
    named = " and ".join(f"world_size={size} on rank {', '.join(of_size)}" for size, of_size in ranks.items())
    return f"All processes of a job have the same world_size. Found {named}. Start all of them with the same one."


def _two_numbers(message: str) -> tuple[int, int]:
    first, second = map(int, message.split())
    return first, second
