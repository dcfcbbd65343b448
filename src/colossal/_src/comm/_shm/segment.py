# pyright: reportPrivateImportUsage=false
"""Shared memory of the processes of one host.

It has no name: a process opens it through the entry that another one has in ``/proc``, which the kernel grants to the
same user only. So there is nothing to guess, nothing that another job could meet, nothing whose size is limited by
``/dev/shm``, and nothing to clean up: the memory is free when the last process that uses it has ended, however it ends.
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import distributed as dist

from colossal.errors import UnsupportedError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _Offer:
    """What one process publishes to the others: where it runs, where its memory is, and what went wrong."""

    host: str = ""
    pid: int = 0
    descriptor: int = -1
    problem: str = ""


def map_shared_memory(
    store: dist.Store, rank: int, size: int, num_bytes: int, problem: str = ""
) -> tuple[int, list[int]]:
    """Get memory that all ranks see, full of zeros."""
    # A group may be made again under the same name, and the store still has the entries of the previous one.
    store = dist.PrefixStore(f"{store.add(f'rounds{rank}', 1)}", store)
    descriptor, offer = -1, _Offer(host=_host(), pid=os.getpid(), problem=problem)
    try:
        if rank == 0:
            descriptor, offer = _make(num_bytes, offer)
            _publish(store, "memory", offer)
        else:
            first = _ask(store, "memory")
            descriptor, offer = _take(first, num_bytes, offer)
        # Also with a problem: the others would wait for this entry until the timeout of the store.
        _publish(store, f"rank{rank}", offer)
        # Rank 0's entry in /proc must stay open until all have opened theirs, which reading every offer makes sure of.
        offers = [_ask(store, f"rank{number}") for number in range(size)]
        _refuse_problems(store, rank, offers)
    except BaseException:
        _close(descriptor)
        raise
    return descriptor, [offer.pid for offer in offers]


def _make(num_bytes: int, offer: _Offer) -> tuple[int, _Offer]:
    descriptor = -1
    try:
        descriptor = os.memfd_create("colossal", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
    except (OSError, AttributeError) as error:
        _close(descriptor)
        reason = f"{num_bytes >> 20} MB of shared memory could not be had on {sys.platform}: {error}"
        return -1, _Offer(offer.host, offer.pid, problem=offer.problem or reason)
    return descriptor, _Offer(offer.host, offer.pid, descriptor, offer.problem)


def _take(first: _Offer, num_bytes: int, offer: _Offer) -> tuple[int, _Offer]:
    # On another host the same path would be that of some other process.
    if first.problem or offer.problem or first.host != offer.host:
        return -1, offer
    path = f"/proc/{first.pid}/fd/{first.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return -1, _Offer(offer.host, offer.pid, problem=f"the memory of rank 0 could not be opened: {error}")
    found = os.fstat(descriptor).st_size
    if found == num_bytes:
        return descriptor, offer
    _close(descriptor)
    reason = f"the memory of rank 0 has {found} bytes instead of {num_bytes}: the ranks run different versions"
    return -1, _Offer(offer.host, offer.pid, problem=reason)


def _problem(offers: list[_Offer]) -> str:
    """Say why these ranks cannot share memory; nothing if they can."""
    hosts = {offer.host for offer in offers}
    if len(hosts) > 1:
        return (
            f"The backend 'shm' joins processes of one host that see each other. Found {len(hosts)} hosts, or "
            "containers with process numbers of their own. Use the backend 'gloo'."
        )
    problems = [f"on rank {rank}, {offer.problem.rstrip('.')}" for rank, offer in enumerate(offers) if offer.problem]
    if problems:
        return (
            f"The backend 'shm' needs memory that all processes can map. Found: {problems[0]}. Use the backend 'gloo'."
        )
    return ""


def _refuse_problems(store: dist.Store, rank: int, offers: list[_Offer]) -> None:
    """Raise for a problem; all ranks learn of it before rank 0, who may keep the store, ends because of it."""
    problem = _problem(offers)
    if not problem:
        return
    store.set(f"read{rank}", "")
    for number in range(len(offers)) if rank == 0 else ():
        store.get(f"read{number}")
    raise UnsupportedError(problem)


def _host() -> str:
    """Name the kernel that runs, and the set of processes that can be seen: what differs is not one host for us."""
    try:
        return f"{_BOOT.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{os.uname().nodename} {sys.platform}"


def _publish(store: dist.Store, key: str, offer: _Offer) -> None:
    store.set(key, json.dumps(asdict(offer)))


def _ask(store: dist.Store, key: str) -> _Offer:
    return _Offer(**json.loads(store.get(key)))


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        with suppress(OSError):
            os.close(descriptor)
