# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false
"""Separate processes find each other."""

import os
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

from colossal._src.cluster.process_spec import ProcessSpec
from colossal._src.cluster.timeouts import call_within
from colossal._src.cluster.world_agreement import FAREWELL_SECONDS, agree_on_world
from colossal.accelerator import Accelerator, get_accelerator
from colossal.errors import ConfigError, LaunchError, MeshError, UnsupportedError

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
