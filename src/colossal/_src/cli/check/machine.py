"""Memory and limits of the operating system that training runs into."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from colossal._src.cli.check.report import Row, Section

TITLE = "machine"
SHARED_BYTES = 2**30
OPEN_FILES = 1024
DISK_BYTES = 2**30

_MEMORY = Path("/proc/meminfo")
_SHARED = Path("/dev/shm")  # noqa: S108 (looked at, not written to)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def look() -> Iterator[Row]:
    """Look at memory, shared memory, disk and limits."""
    yield from _memory()
    yield _shared()
    yield _open_files()
    yield _locked()
    yield from _huge_pages()
    yield _disk(Path(tempfile.gettempdir()))


def _memory() -> Iterator[Row]:
    if _MEMORY.exists():
        lines = (line.split() for line in _MEMORY.read_text(encoding="ascii").splitlines())
        sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
        free, total = sizes["MemAvailable"], sizes["MemTotal"]
        yield Row(TITLE, "memory", "ok", f"{_size(free)} available of {_size(total)}", free)
        for path in _CONTAINER_LIMITS:
            limit = path.read_text(encoding="ascii").strip() if path.exists() else ""
            if limit.isdigit() and int(limit) < total:
                found = f"this container may use {_size(int(limit))}"
                yield Row(TITLE, "memory limit", "note", found, int(limit), "Beyond it processes are killed.")


def _shared() -> Row:
    if not _SHARED.is_dir() or not os.access(_SHARED, os.W_OK):
        advice = "Mount a tmpfs at /dev/shm: the workers of a data loader pass their batches through it."
        return Row(TITLE, "shared memory", "note", "no /dev/shm that can be written to", 0, advice)
    free = shutil.disk_usage(_SHARED).free
    if free < SHARED_BYTES:
        advice = "Give it 1 GiB or more, with Docker by --shm-size: the workers of a data loader need it."
        return Row(TITLE, "shared memory", "note", f"{_size(free)} free in /dev/shm", free, advice)
    return Row(TITLE, "shared memory", "ok", f"{_size(free)} free in /dev/shm", free)


def _open_files() -> Row:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} (may be raised to {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        advice = f"Raise it: ulimit -n {OPEN_FILES}. Each rank holds connections to its peers, loaders and shards."
        return Row(TITLE, "open files", "note", found, soft, advice)
    return Row(TITLE, "open files", "ok", found, soft)


def _locked() -> Row:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = _limit(soft) if soft == resource.RLIM_INFINITY else _size(soft)
    return Row(TITLE, "memory that may be locked", "ok", found, soft)


def _huge_pages() -> Iterator[Row]:
    if _HUGE_PAGES.exists():
        choice = _HUGE_PAGES.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
        yield Row(TITLE, "transparent huge pages", "ok", choice, choice)


def _disk(folder: Path) -> Row:
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        advice = "Free some, or set TMPDIR to a roomier folder: downloads and checks write there."
        return Row(TITLE, "temporary files", "note", f"{_size(free)} free in {folder}", free, advice)
    return Row(TITLE, "temporary files", "ok", f"{_size(free)} free in {folder}", free)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


SECTION = Section(TITLE, look)
