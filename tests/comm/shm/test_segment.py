"""The memory that ranks share: who sees it, how long it is there, and what happens where it cannot be had."""

import logging
import os
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torch import distributed as dist

import colossal
from colossal._src import _native
from colossal._src.cluster.rendezvous import WorldSpec, form_world
from colossal._src.comm._shm import engine, make_engine, segment
from colossal._src.comm._shm.work import P2PWork
from colossal._src.testing.processes import WorldError
from colossal.errors import UnsupportedError
from colossal.logging import get_dist_logger
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

NOBODY = 65534
VISIBLE = Path("/dev/shm")  # noqa: S108 (it is looked at, not written to)
NAME = "memfd:colossal"
NO_COMPILER = "Code of its own needs a C++ compiler. Found none: /nowhere. Everything works without it, only slower"
HOSTS = "The backend 'shm' joins processes of one host that see each other. Found 2 hosts"
MEMORY = "The backend 'shm' needs memory that all processes can map. Found: on rank {rank}, {found}"


def mapped(process: int | str = "self") -> set[int]:
    """Return the numbers of the pieces of memory that a process has from its groups."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if NAME in line}


def open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:  # the folder itself, while it was read
            continue
    return found


def total() -> float:
    value = torch.ones(1000)
    dist.all_reduce(value)
    return value.mean().item()


# --------------------------------------------------------------------------------------------------- names


def look_around() -> tuple[set[int], list[str], list[str], list[str]]:
    group: Any = dist.new_group()
    assert total() == 3.0
    dist.barrier(group)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(VISIBLE) in line]
    memory, files = mapped(), open_files()
    del group
    dist.destroy_process_group()
    return memory, maps, files, open_files()


def test_the_memory_has_no_name_and_no_descriptor_stays_open() -> None:
    before = set(VISIBLE.iterdir())
    found = run_processes(look_around, 3, fresh=True)
    assert not [each for each in set(VISIBLE.iterdir()) - before if "colossal" in each.name]
    for memory, maps, files, files_afterwards in found:
        assert len(memory) == 2  # the world and a group
        assert memory == found[0][0]
        assert not maps
        assert not [file for file in (*files, *files_afterwards) if "memfd" in file or str(VISIBLE) in file]
        assert not [file for file in files_afterwards if "pidfd" in file]


def die_together(folder: str) -> None:
    (memory,) = mapped()
    Path(folder, str(dist.get_rank())).write_text(str(memory))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def users_of(memory: int) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += [folder.name] if memory in mapped(folder.name) else []
        except OSError:  # it has ended, or is another user's
            continue
    return found


def test_nothing_is_left_when_all_ranks_were_killed(tmp_path) -> None:
    before = set(VISIBLE.iterdir())
    with pytest.raises(WorldError) as caught:
        run_processes(die_together, 3, str(tmp_path), fresh=True)
    assert len(re.findall(r"^Rank \d: The process died with exit code -9", str(caught.value), re.MULTILINE)) == 3
    memory = {int(file.read_text()) for file in tmp_path.iterdir()}
    assert len(memory) == 1
    assert not users_of(memory.pop())
    assert not [each for each in set(VISIBLE.iterdir()) - before if "colossal" in each.name]


def join_one_of_two(folder: str) -> tuple[float, set[int]]:
    """Form two worlds of the same shape at one store at the same time."""
    number, world = int(os.environ["NUMBER"]), int(os.environ["NUMBER"]) % 2
    store = dist.FileStore(str(Path(folder, "store")), 4)
    backend, _ = form_world(WorldSpec(dist.PrefixStore(f"world{world}", store), number // 2, 2, 60.0))
    assert backend == "shm"
    value = torch.zeros(1000)
    for _ in range(50):
        value = torch.full((1000,), float(10**world))
        dist.all_reduce(value)
    return value.mean().item(), mapped()


def test_two_worlds_at_once_do_not_meet(tmp_path) -> None:
    found = run_processes(join_one_of_two, 4, str(tmp_path), form=False, environment={"NUMBER": "{rank}"})
    assert [value for value, _ in found] == [2.0, 20.0, 2.0, 20.0]
    assert found[0][1] == found[2][1]
    assert found[1][1] == found[3][1]
    assert not found[0][1] & found[1][1]


def test_another_user_cannot_open_the_memory() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a program as somebody else")
    descriptor, offer = segment._make(4096, segment._Offer("here", os.getpid()))
    try:
        path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
        head = ["head", "-c", "1", path]
        assert subprocess.run(head, capture_output=True, check=True).stdout == b"\0"
        others = subprocess.run(head, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False)
        assert others.returncode
        assert b"Permission denied" in others.stderr
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------- without it


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def launch_anyhow(port: int, backend: str | None) -> tuple[str, list[str]]:
    """Return the backend or the error, and what this rank logs."""
    heard = Heard()
    logging.getLogger(get_dist_logger().name).addHandler(heard)
    try:
        colossal.launch(int(os.environ["NUMBER"]), 2, "127.0.0.1", port, backend)
    except UnsupportedError as error:
        return str(error), heard.messages
    assert total() == 2.0
    return dist.get_backend(), heard.messages


@pytest.mark.parametrize("backend", [None, "shm", "gloo"])
def test_without_a_compiler_launch_falls_back_to_gloo_and_says_so_once(backend, tmp_path) -> None:
    environment = {"NUMBER": "{rank}", "CXX": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    first, second = run_processes(launch_anyhow, 2, free_port(), backend, form=False, environment=environment)
    reason = MEMORY.format(rank=0, found=NO_COMPILER)
    assert first[0] == second[0]
    if backend == "shm":
        assert first[0].startswith(reason)
        assert first[0].endswith("Use the backend 'gloo'.")
        assert not first[1]
    else:
        assert first[0] == "gloo"
        (message,) = first[1]
        assert message.startswith("[rank 0] 2 process(es), cpu, gloo, seed 1024")
        assert message.count(reason) == (backend is None)
    assert not second[1]


def formed(store: dist.Store, backend: str | None = None) -> tuple[str, str]:
    """Return the backend of a world and the remark about it, or the error."""
    try:
        found = form_world(WorldSpec(store, int(os.environ["NUMBER"]), 3, 60.0), backend)
    except UnsupportedError as error:
        return "none", str(error)
    assert total() == 3.0
    dist.destroy_process_group()
    return found


host, take = segment._host, segment._take


def run_into_obstacles(folder: str) -> list[tuple[str, str]]:
    """Form worlds of three, one after another, each with another reason why it cannot be done."""
    rank, store = int(os.environ["NUMBER"]), dist.FileStore(str(Path(folder, "store")), 3)
    found: list[tuple[str, str]] = []

    def form(name: str) -> None:
        found.extend(formed(dist.PrefixStore(f"{name} {backend}", store), backend) for backend in (None, "shm"))

    os.environ["CXX"] = "/nowhere" if rank == 1 else ""
    form("no compiler on rank 1")
    os.environ["CXX"] = ""
    engine.functions.cache_clear()
    _native._attempt.cache_clear()
    if rank == 2:
        segment._host = lambda: "elsewhere"
    form("another host")
    segment._host = host
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    form("no memory")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if rank == 1:
        segment._take = lambda first, num_bytes, offer: take(first, num_bytes + 1, offer)
    form("another version")
    segment._take = take
    form("nothing in the way")
    return found


def test_what_keeps_one_rank_from_the_memory_keeps_all_and_is_named(tmp_path) -> None:
    found = run_processes(run_into_obstacles, 3, str(tmp_path), form=False, environment={"NUMBER": "{rank}"})
    assert found[0] == found[1] == found[2]
    outcome = found[0]
    reasons = [
        MEMORY.format(rank=1, found=NO_COMPILER),
        HOSTS,
        MEMORY.format(rank=0, found=""),
        MEMORY.format(rank=1, found="the memory of rank 0 has"),
    ]
    for number, reason in enumerate(reasons):
        (by_default, remark), (wanted, error) = outcome[2 * number : 2 * number + 2]
        assert (by_default, wanted) == ("gloo", "none")
        assert remark.startswith(f"; {reason}")
        assert error.startswith(reason)
        assert error.endswith("Use the backend 'gloo'.")
    assert "could not be had on linux: [Errno 27] File too large" in outcome[5][1]
    assert outcome[8:] == [("shm", ""), ("shm", "")]


def drop_the_engine_before_its_message(folder: Path) -> bool:
    rank, tensor = dist.get_rank(), torch.ones(2)
    end = make_engine(dist.FileStore(str(folder / "store"), 2), rank, [0, 1])
    message = end.receive(0, 1, tensor) if rank else end.send(1, 1, tensor)
    work = P2PWork(end, message, tensor, 20.0, lambda _: None)
    work.wait()
    dist.barrier()
    end.__del__()  # as the garbage collector may do first, in a cycle of both
    del work
    return True


def test_a_message_may_outlive_its_group(tmp_path: Path) -> None:
    assert run_processes(drop_the_engine_before_its_message, 2, tmp_path) == [True, True]
