# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false
"""Separate processes find each other."""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from colossal.cluster.attempt import enter_attempt
from colossal.errors import LaunchError, UnsupportedError

_ADVICE = " Use the backend 'gloo'."


@final
@dataclass(frozen=True)
class Member:
    """One process's place in the world, and where the world meets."""

    rank: int
    world_size: int
    host: str
    port: int
    local_rank: int | None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise LaunchError(f"A world has at least 1 process. Found world_size={self.world_size}. Pass 1 or more.")
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"The rank of a process is between 0 and world_size - 1. Found rank={self.rank} in a world of "
                f"{self.world_size}. Number the processes from 0, or raise world_size."
            )
        if not 0 < self.port < 2**16:
            raise LaunchError(f"A port is between 1 and 65535. Found port={self.port}. Pick a free one, such as 29500.")
        if not self.host:
            raise LaunchError(
                "All processes meet at the host of rank 0. Found an empty host. Pass its name or address."
            )

    @property
    def address(self) -> str:
        """Host and port, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def meet(member: Member, seconds: float) -> dist.Store:
    """Return the store that all processes share, once all of them have come to it.

    Raises:
        LaunchError: The port is taken, or a process did not come in time.
    """
    timeout = timedelta(seconds=seconds)
    try:
        if _serves_torchrun(member):
            store, _, _ = next(rendezvous("env://", member.rank, member.world_size, timeout=timeout))
            return enter_attempt(store, member.rank, member.world_size, seconds)
        return dist.TCPStore(member.host, member.port, member.world_size, member.rank == 0, timeout, multi_tenant=True)
    except dist.DistError as error:
        raise LaunchError(_explain(member, seconds, str(error))) from error


def _serves_torchrun(member: Member) -> bool:
    """Tell whether torchrun's own process keeps a store at this address already."""
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address == (member.host, str(member.port))


def _explain(member: Member, seconds: float, reason: str) -> str:
    if "EADDRINUSE" in reason or "address already in use" in reason:
        return (
            f"Rank 0 opens a port for the others to meet. Found {member.address} in use by another program. "
            "Pick a free port and pass it to all processes, or let torchrun --standalone pick one."
        )
    if member.rank == 0:
        return (
            f"All {member.world_size} processes must come to {member.address} within {seconds:g} s. "
            f"Found some missing: {reason.splitlines()[0]} Start them with the same host, port and world_size, "
            "or pass a larger timeout_seconds."
        )
    return (
        f"Rank {member.rank} must reach rank 0 at {member.address} within {seconds:g} s. "
        f"Found no answer: {reason.splitlines()[0]} Check that rank 0 runs, and that host and port are the same."
    )


def find_local_rank(member: Member, store: dist.Store) -> int:
    """Count the processes of lower rank that run on a host of the same name."""
    names = dist.PrefixStore("colossal/host", store)
    names.set(str(member.rank), socket.gethostname())
    own = socket.gethostname().encode()
    return sum(names.get(str(lower)) == own for lower in range(member.rank))


@dataclass(frozen=True)
class World:
    """What every process needs to know to become one world with the others."""

    store: dist.Store
    rank: int
    size: int
    seconds: float


def form_world(world: World, backend: str | None = None) -> tuple[str, str]:
    """Open the connections between all processes: the default process group.

    Args:
        world: The processes.
        backend: What carries their data; None for the best on CPUs: shared memory, or gloo where there is none.

    Returns:
        The backend, and a remark about what keeps it from being the faster one.

    Raises:
        LaunchError: A process did not connect in time.
        UnsupportedError: The backend cannot join these processes; on all of them.
    """
    if backend is not None:
        _open_connections(world, backend)
        return backend, ""
    try:
        _open_connections(world, "shm")
    except UnsupportedError as error:  # the same on all ranks
        _open_connections(world, "gloo")
        return "gloo", f"; {str(error).removesuffix(_ADVICE)}"
    return "shm", ""


def _open_connections(world: World, backend: str) -> None:
    timeout = timedelta(seconds=world.seconds)
    with _connecting(world):
        dist.init_process_group(backend, store=world.store, rank=world.rank, world_size=world.size, timeout=timeout)


def wait_for_all(backend: str, world: World) -> None:
    """Wait until all processes are connected: one with little to do could end, and be missed by the slower ones.

    Raises:
        LaunchError: A process was not connected in time.
    """
    if backend != "nccl":  # which opens its connections when they are first used
        with _connecting(world):
            dist.all_reduce(torch.zeros(()))


@contextmanager
def _connecting(world: World) -> Generator[None]:
    try:
        yield
    except UnsupportedError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(
            f"All {world.size} processes must connect to each other within {world.seconds:g} s. Found that rank "
            f"{world.rank} could not: {str(error).splitlines()[0]} Look for the first error among the other ranks."
        ) from error
