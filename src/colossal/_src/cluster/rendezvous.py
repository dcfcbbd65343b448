# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Separate processes find each other."""

import os
import socket
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
from torch import distributed as dist

from colossal._src.cluster.process_spec import ProcessSpec
from colossal._src.cluster.timeouts import call_within
from colossal.accelerator import Accelerator, get_accelerator
from colossal.errors import ConfigError, LaunchError, MeshError, UnsupportedError

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
        # Adding nothing reads the counter.
        count = self._store.add(self._name, 0)
        self._unread += range(self._count + 1, count + 1)
        self._count = count
        # A number is taken before its message is stored, so a later message may arrive first.
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
    # Not by rank: a store that outlives an attempt may still have the greetings of processes that have ended.
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


_ADVICE = " Use the backend 'gloo'."
_NO_DEVICE = "none"
_PAUSE_SECONDS = 0.05
_SLACK_SECONDS = 0.5  # for what ends by itself, with a reason of its own


def connect_to_store(member: ProcessSpec, seconds: float) -> dist.Store:
    """Return the store of the job, once all processes have connected to it and agree on the world size."""
    lasting = _serves_torchrun(member)
    try:
        store = call_within(seconds + _SLACK_SECONDS, lambda: _open_store(member, seconds, lasting))
        # Enough for two waits, each of which ends by itself: what is in the way is a store that has stopped to answer.
        patience = 2 * (seconds + FAREWELL_SECONDS) + _SLACK_SECONDS
        return call_within(patience, lambda: agree_on_world(store, member, seconds, lasting=lasting))
    except TimeoutError as error:
        raise LaunchError(_explain(member, seconds, "")) from error
    except dist.DistError as error:
        raise LaunchError(_explain(member, seconds, str(error).splitlines()[0])) from error


def _serves_torchrun(member: ProcessSpec) -> bool:
    """Return whether torchrun's own process keeps a store at this address already."""
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address == (member.host, str(member.port))


def _open_store(member: ProcessSpec, seconds: float, exists: bool) -> dist.Store:
    """Return the store at the address of rank 0, which opens it unless it exists."""
    opens = member.rank == 0 and not exists
    if not opens:
        _await_listener(member, seconds)
    timeout = timedelta(seconds=seconds)
    # torch would wait for the other processes without saying who is missing; `agree_on_world` does.
    return dist.TCPStore(member.host, member.port, None, opens, timeout, wait_for_workers=False, multi_tenant=True)


def _await_listener(member: ProcessSpec, seconds: float) -> None:
    """Wait until a program listens at the address of rank 0; torch would take twice the time, and print a stack."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(
                (member.host, member.port), max(deadline - time.monotonic(), _PAUSE_SECONDS)
            ).close()
        except OSError as error:
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                raise LaunchError(
                    f"Rank {member.rank} must reach rank 0 at {member.address} within {seconds:g} s. Found no program "
                    f"that listens there: {error.strerror or error}. Check that rank 0 runs, and that host and port "
                    "are the same on all ranks."
                ) from error
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _explain(member: ProcessSpec, seconds: float, reason: str) -> str:
    if "EADDRINUSE" in reason or "address already in use" in reason:
        return (
            f"Rank 0 opens a port for the others to meet. Found {member.address} in use by another program. "
            "Pick a free port and pass it to all processes, or let torchrun --standalone pick one."
        )
    found = f" ({reason})" if reason else ""
    return (
        f"Rank {member.rank} must reach rank 0 at {member.address} within {seconds:g} s. Found a connection without an "
        f"answer{found}: another program holds the port, or rank 0 hangs or has ended. Look for the first error among "
        "the other ranks, or pick a port that is free on the host of rank 0 and pass both to all processes."
    )


def find_local_rank(member: ProcessSpec, store: dist.Store) -> int:
    """Count the processes of lower rank that run on a host of the same name."""
    names = dist.PrefixStore("colossal/host", store)
    names.set(str(member.rank), socket.gethostname())
    own = socket.gethostname().encode()
    return sum(names.get(str(lower)) == own for lower in range(member.rank))


@dataclass(frozen=True)
class WorldSpec:
    """What every process needs to know to form the process group with the others."""

    store: dist.Store
    rank: int
    size: int
    seconds: float


def form_world(world: WorldSpec, backend: str | None = None) -> tuple[str, str]:
    """Open the connections between all processes: the default process group."""
    accelerator = get_accelerator()
    if backend is not None or not accelerator.is_cpu:
        chosen = backend or accelerator.communication_backend
        _open_connections(world, chosen)
        return chosen, ""
    try:
        _open_connections(world, "shm")
    except UnsupportedError as error:  # the same on all ranks
        _open_connections(world, "gloo")
        return "gloo", f"; {str(error).removesuffix(_ADVICE)}"
    return "shm", ""


def bind_device(world: WorldSpec, accelerator: Accelerator, local_rank: int, *, allow_same_device: bool) -> None:
    """Bind this process to its device."""
    problem = None
    try:
        accelerator.set_device(local_rank)
    except ConfigError as error:
        problem = error
    if not allow_same_device:
        own = _NO_DEVICE if problem else f"{socket.gethostname()} {accelerator.identity() or f'rank {world.rank}'}"
        devices = dist.PrefixStore("colossal/device", world.store)
        # Stored also by a rank without a device, as the others wait for its entry.
        devices.set(str(world.rank), own)
        _check_devices([devices.get(str(rank)).decode() for rank in range(world.size)], problem)
    if problem is not None:
        raise problem


def _check_devices(found: Sequence[str], problem: ConfigError | None) -> None:
    """Refuse ranks without a device, or with one that another rank has."""
    advice = (
        "Start fewer processes on this host, let the launcher show each its own device, or use COLOSSAL_DEVICE=cpu."
    )
    if _NO_DEVICE in found and problem is None:
        raise LaunchError(
            f"Each process needs a device of its own. Found none for rank {found.index(_NO_DEVICE)}, whose error says "
            f"why. {advice}"
        )
    for rank, device in enumerate(found):
        if device != _NO_DEVICE and (first := found.index(device)) != rank:
            raise LaunchError(
                f"Each process needs a device of its own. Found ranks {first} and {rank} on one: {device}. {advice}"
            )


def _open_connections(world: WorldSpec, backend: str) -> None:
    timeout = timedelta(seconds=world.seconds)
    if not get_accelerator().is_cpu:
        from colossal._src.cluster.watchdog import set_watchdog

        set_watchdog(backend)
    with connecting(world):
        # Without device_id: NCCL would then form groups by splits of this one, in which all ranks must take part, while
        # ranks form only the groups that they are in.
        dist.init_process_group(backend, store=world.store, rank=world.rank, world_size=world.size, timeout=timeout)


def wait_for_all(world: WorldSpec) -> None:
    """Wait until all processes are connected: one with little to do could end, and be missed by the slower ones.

    A backend of an accelerator opens its connections when it is first used, and its waits do not raise: what is missing
    would show in a later step, and end the process.
    """

    def sum_ones() -> None:
        accelerator.set_device(local_device)
        one = torch.ones((), device=accelerator.get_current_device())
        dist.all_reduce(one)
        if one.item() != world.size:
            raise RuntimeError(f"the sum of {world.size} ones is {one.item():g}")

    accelerator = get_accelerator()
    local_device = accelerator.get_current_device().index or 0  # which a thread does not inherit
    with connecting(world):
        if accelerator.is_cpu:
            sum_ones()
            return
        try:
            call_within(world.seconds + _SLACK_SECONDS, sum_ones)
        except TimeoutError as error:
            raise RuntimeError("the accelerators did not answer each other.") from error


@contextmanager
def connecting(world: WorldSpec) -> Generator[None]:
    """Turn what torch and the backends raise while processes connect into a LaunchError."""
    try:
        yield
    except (ConfigError, LaunchError, MeshError, UnsupportedError):
        raise
    except RuntimeError as error:  # torch's DistError is one, and so is a CommunicationError
        raise LaunchError(
            f"All {world.size} processes must connect to each other within {world.seconds:g} s. Found that rank "
            f"{world.rank} could not: {str(error).splitlines()[0]} Look for the first error among the other ranks."
        ) from error
