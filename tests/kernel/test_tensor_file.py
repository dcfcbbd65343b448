import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from colossal._src.offload import DirectIO, TensorFile, direct_io, io_engine, scratch_file
from colossal._src.offload.io_engine import ENGINES, FileTransfer, open_io_engine
from colossal._src.offload.scratch_file import ScratchFile
from colossal.errors import CheckpointError, ConfigError, ShapeError, UnsupportedError
from colossal.kernel import huge_zeros
from colossal.offload import StateStore

pytestmark = pytest.mark.slow

SPAN = io_engine._SPAN
SIZES = (0, 1, 511, 4096, 4097, 1_000_003, SPAN, 2 * SPAN + 4096, 3 * SPAN + 77)
WAYS = (DirectIO(read=False, write=False), DirectIO(read=True, write=True), DirectIO(read=True, write=False))


def allowed(name: str) -> bool:
    try:
        open_io_engine(name).close()
    except UnsupportedError:
        return False
    return True


def engines() -> list:
    """All engines; those that this machine does not allow are skipped."""
    skip = pytest.mark.skip(reason="this machine does not allow the engine")
    return [pytest.param(name, marks=() if allowed(name) else skip) for name in ENGINES]


@pytest.fixture(params=engines())
def engine(request) -> str:
    return request.param


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A directory that is empty in the end."""
    yield tmp_path
    if list(tmp_path.iterdir()):
        gc.collect()  # a file that nobody holds any more may still wait for this
    assert not list(tmp_path.iterdir())


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    some = torch.randint(0, 256, (min(num_bytes, 10_007),), generator=torch.Generator().manual_seed(seed))
    return some.to(torch.uint8).repeat(num_bytes // 10_007 + 1)[:num_bytes].contiguous()


def aligned(num_bytes: int) -> torch.Tensor:
    return huge_zeros([(num_bytes,)], torch.uint8)[0]


def run(program: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(io_engine.__file__).parents[3])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


# ------------------------------------------------------------------------------------------ what is written comes back


@pytest.mark.parametrize("direct", WAYS)
@pytest.mark.parametrize("make", [aligned, lambda size: torch.zeros(size + 1, dtype=torch.uint8)[1:]])
def test_what_is_written_comes_back(engine, direct, make, disk) -> None:
    with TensorFile(disk, SIZES, engine, direct) as file:
        assert file.engine == engine
        sources = [make(size).copy_(noise(size, seed)) for seed, size in enumerate(SIZES)]
        for request in [file.write(slot, source) for slot, source in enumerate(sources)]:
            request.wait()
        targets = [make(size) for size in SIZES]
        for request in [file.read(slot, target) for slot, target in enumerate(targets)]:
            request.wait()
        assert all(map(torch.equal, sources, targets))


def test_a_slot_begins_as_zeros_and_takes_less_than_its_size(engine, disk) -> None:
    with TensorFile(disk, [10_000, 4], engine) as file:
        file.write(0, torch.ones(2)).wait()
        back = torch.full((2500,), 7.0)
        file.read(0, back).wait()
        assert back[:2].tolist() == [1.0, 1.0]
        assert not back[2:].any()


def test_types_and_shapes_do_not_matter(disk) -> None:
    with TensorFile(disk, [24, 24]) as file:
        source = torch.arange(6, dtype=torch.float32).view(2, 3).requires_grad_()
        file.write(-1, source).wait()
        back = torch.zeros(3, 2)
        file.read(1, back).wait()
        assert torch.equal(back.view(2, 3), source)


def test_many_requests_are_in_flight(engine, disk) -> None:
    count, size = 300, 20_000
    with TensorFile(disk, [size] * count, engine, DirectIO(read=True, write=True)) as file:
        sources = list(aligned(count * 20_480).view(count, 20_480)[:, :size])
        for seed, source in enumerate(sources):
            source.copy_(noise(size, seed))
        writes = [file.write(slot, source) for slot, source in enumerate(sources)]
        for request in reversed(writes):
            request.wait()
        targets = list(aligned(count * 20_480).view(count, 20_480)[:, :size])
        reads = [file.read(slot, target) for slot, target in enumerate(targets)]
        for request in reversed(reads):
            request.wait()
            assert request.is_done
        assert all(map(torch.equal, sources, targets))


def test_threads_may_share_a_file(engine, disk) -> None:
    wrong: list[int] = []
    with TensorFile(disk, [50_000] * 4, engine) as file:

        def use(slot: int) -> None:
            for turn in range(20):
                source, back = noise(50_000, turn), torch.zeros(50_000, dtype=torch.uint8)
                file.write(slot, source).wait()
                file.read(slot, back).wait()
                wrong.extend([] if torch.equal(source, back) else [slot])

        threads = [threading.Thread(target=use, args=(slot,)) for slot in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_request_keeps_its_tensor_and_closing_waits(engine, disk) -> None:
    size = 4 * SPAN
    file = TensorFile(disk, [size] * 8, engine)
    backs = [torch.zeros(size, dtype=torch.uint8) for _ in range(8)]
    for slot in range(8):
        file.write(slot, noise(size, slot))  # nobody else holds the tensor
    file._flights.requests[-1].wait()
    for request in list(file._flights.requests):
        request.wait()
    for slot, back in enumerate(backs):
        file.read(slot, back)
    file.close()
    file.close()
    assert all(torch.equal(back, noise(size, slot)) for slot, back in enumerate(backs))


def test_a_file_that_is_dropped_is_closed(engine, disk) -> None:
    file = TensorFile(disk, [SPAN], engine)
    file.write(0, noise(SPAN))
    flights = file._flights
    del file
    assert flights.is_closed
    assert flights.file.buffered == -1


def test_the_end_of_the_process_closes_it(engine, disk) -> None:
    program = """
        import sys, torch
        from colossal._src.offload import TensorFile
        file = TensorFile(sys.argv[1], [1 << 24], sys.argv[2])
        file.write(0, torch.zeros(1 << 24, dtype=torch.uint8))
    """
    done = run(program, disk, engine)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------ the way past the page cache


def test_whole_blocks_go_past_the_page_cache_and_the_rest_does_not(disk) -> None:
    del disk
    for address, num_bytes, direct in ((4096, 8192, 8192), (4096, 8200, 8192), (4096, 100, 0), (4160, 8192, 0)):
        assert FileTransfer(address, 0, num_bytes, 3, 4, is_write=True).num_direct_bytes == direct


@pytest.mark.parametrize("way", WAYS)
def test_small_files_are_not_probed_and_a_choice_is_honoured(way, disk, monkeypatch) -> None:
    monkeypatch.setattr(direct_io, "_FOUND", {})
    with TensorFile(disk, [100]) as file, TensorFile(disk, [100], direct=way) as other:
        assert file.direct == DirectIO(read=False, write=False)
        assert other.direct == way
    assert not direct_io._FOUND


@pytest.mark.parametrize(
    ("slow", "found"),
    [
        ({"direct"}, DirectIO(read=False, write=False)),
        ({"buffered"}, DirectIO(read=True, write=True)),
        ({"direct read", "buffered write"}, DirectIO(read=False, write=True)),
        (set(), DirectIO(read=True, write=True)),
    ],
)
def test_the_probe_finds_the_faster_way(slow, found, disk, monkeypatch) -> None:
    def seconds(_engine: object, transfer: FileTransfer) -> float:
        way = "direct" if transfer.direct != transfer.buffered else "buffered"
        return 2.0 if slow & {way, f"{way} {'write' if transfer.is_write else 'read'}"} else 1.0

    monkeypatch.setattr(direct_io, "_FOUND", {})
    monkeypatch.setattr(direct_io, "_seconds", seconds)
    monkeypatch.setattr(direct_io, "_BYTES", 4096)
    monkeypatch.setattr(ScratchFile, "_past_the_cache", lambda self: os.dup(self.buffered))
    opened = open_io_engine("python")
    try:
        assert direct_io.probe(disk, opened) == found
        monkeypatch.setattr(direct_io, "_seconds", None)  # it is not asked again
        assert direct_io.probe(disk, opened) == found
    finally:
        opened.close()


def test_the_probe_really_transfers(engine, disk, monkeypatch) -> None:
    monkeypatch.setattr(direct_io, "_FOUND", {})
    monkeypatch.setattr(direct_io, "_BYTES", 1 << 20)
    opened = open_io_engine(engine)
    try:
        direct_io.probe(disk, opened)
        assert len(direct_io._FOUND) == 1
    finally:
        opened.close()


def test_a_file_system_that_refuses_direct_transfers_is_used_through_the_page_cache(engine, disk, monkeypatch) -> None:
    monkeypatch.setattr(ScratchFile, "_past_the_cache", lambda self: self.buffered)
    with TensorFile(disk, [SPAN + 5], engine, DirectIO(read=True, write=True)) as file:
        source, back = aligned(SPAN + 5).copy_(noise(SPAN + 5)), aligned(SPAN + 5)
        file.write(0, source).wait()
        file.read(0, back).wait()
        assert torch.equal(source, back)


def test_a_refused_direct_transfer_is_made_through_the_page_cache(disk, monkeypatch) -> None:
    refused = []

    def picky(descriptor: int, *rest: Any) -> int:
        if descriptor == file.direct:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, *rest)

    real, file, opened = os.pwritev, ScratchFile(disk, 8192), open_io_engine("python")
    monkeypatch.setattr(os, "pwritev", picky)
    monkeypatch.setattr(file, "direct", os.dup(file.buffered))
    try:
        memory = aligned(8192).copy_(noise(8192))
        handle = opened.submit(FileTransfer(memory.data_ptr(), 0, 8192, file.buffered, file.direct, is_write=True))
        assert opened.wait(handle) == 0
        assert os.pread(file.buffered, 8192, 0) == bytes(memory.tolist())
        assert refused == [file.direct]
    finally:
        opened.close()
        os.close(file.direct)
        monkeypatch.undo()
        file.close()


# ------------------------------------------------------------------------------------------ engines


def test_without_a_compiler_it_is_python(disk, monkeypatch) -> None:
    def refuse(_: str) -> None:
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(io_engine, "library", refuse)
    io_engine._functions.cache_clear()
    try:
        with TensorFile(disk, [4]) as file:
            assert file.engine == "python"
        with pytest.raises(UnsupportedError, match="no compiler"):
            TensorFile(disk, [4], engine="threads")
    finally:
        io_engine._functions.cache_clear()


@pytest.mark.skipif(not allowed("threads"), reason="needs a C++ compiler")
def test_where_io_uring_is_forbidden_it_is_threads(disk, monkeypatch) -> None:
    class Without:
        """The library on a system that has no rings."""

        def __getattr__(self, name: str) -> object:
            return (lambda _depth: None) if name == "ring" else getattr(real, name)

    real = io_engine._functions()
    monkeypatch.setattr(io_engine, "_functions", Without)
    with TensorFile(disk, [4]) as file:
        assert file.engine == "threads"
    with pytest.raises(UnsupportedError, match="'io_uring' must be allowed"):
        TensorFile(disk, [4], engine="io_uring")


# ------------------------------------------------------------------------------------------ errors


def test_arguments_that_cannot_work(disk) -> None:
    with pytest.raises(ConfigError, match="Found engine 'libaio'"):
        TensorFile(disk, [4], engine="libaio")
    with pytest.raises(ConfigError, match="sizes from -1"):
        TensorFile(disk, [-1])


def test_a_missing_directory(engine, disk) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        TensorFile(disk / "missing", [4], engine)


def test_a_directory_that_may_not_be_written_to(disk, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        ScratchFile(disk, 4)


def test_a_full_disk_is_found_at_the_start(disk) -> None:
    # more than any disk has, so that none of it is filled: what others write there at the same time must fit
    with pytest.raises(ConfigError, match=r"[Nn]o space left|too large"):
        TensorFile(disk, [1 << 60], direct=DirectIO(read=True, write=True))


def test_a_full_disk_at_the_start_leaves_nothing_open(disk, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        TensorFile(disk, [1 << 20])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_system_that_cannot_reserve_room(engine, disk, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with TensorFile(disk, [40], engine) as file:
        back = torch.ones(10)
        file.read(0, back).wait()
        assert not back.any()


@pytest.mark.parametrize("direct", WAYS[:2])
def test_a_file_that_was_cut_off(engine, direct, disk) -> None:
    size = 2 * SPAN
    with TensorFile(disk, [size], engine, direct) as file:
        os.ftruncate(file._flights.file.buffered, SPAN + 4096)
        request = file.read(0, aligned(size))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="must be read in full.*the file ends too early"):
                request.wait()


@pytest.mark.parametrize("direct", WAYS[:2])
def test_a_write_that_fails_leaves_the_tensor_as_it_is(engine, direct, disk) -> None:
    """Beyond the largest size that the process may give a file, the system refuses to write."""
    size = 4 * SPAN
    source = aligned(size).copy_(noise(size))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TensorFile(disk, [size], engine, direct) as file:
        os.ftruncate(file._flights.file.buffered, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SPAN, before[1]))
        try:
            request = file.write(0, source)
            with pytest.raises(CheckpointError, match="must be written in full.*File too large") as caught:
                request.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert torch.equal(source, noise(size))


def test_a_device_that_is_full(engine, disk) -> None:
    with TensorFile(disk, [SPAN], engine) as file:
        full = os.open("/dev/full", os.O_RDWR)
        own, file._flights.file.buffered = file._flights.file.buffered, full
        with pytest.raises(CheckpointError, match="No space left on device"):
            file.write(0, torch.zeros(SPAN, dtype=torch.uint8)).wait()
        file._flights.file.buffered = own
        os.close(full)


def test_closing_tells_of_an_error_that_nobody_waited_for(engine, disk) -> None:
    file = TensorFile(disk, [SPAN], engine)
    os.ftruncate(file._flights.file.buffered, 0)
    file.read(0, torch.zeros(SPAN, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="ends too early"):
        file.close()
    file.close()
    assert file._flights.file.buffered == -1


def test_an_error_that_was_told_is_not_told_again(engine, disk) -> None:
    with TensorFile(disk, [SPAN], engine) as file:
        os.ftruncate(file._flights.file.buffered, 0)
        with pytest.raises(CheckpointError):
            file.read(0, torch.zeros(SPAN, dtype=torch.uint8)).wait()


def test_an_exception_of_the_block_goes_first(disk) -> None:
    def spoil() -> None:
        with TensorFile(disk, [SPAN]) as file:
            os.ftruncate(file._flights.file.buffered, 0)
            file.read(0, torch.zeros(SPAN, dtype=torch.uint8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spoil()


def test_tensors_that_do_not_fit(disk) -> None:
    with TensorFile(disk, [16]) as file:
        with pytest.raises(ShapeError, match="at most 16 bytes. Found 20 bytes"):
            file.write(0, torch.zeros(5))
        with pytest.raises(ShapeError, match="not contiguous"):
            file.read(0, torch.zeros(2, 2).t())
        with pytest.raises(ShapeError, match="on meta"):
            file.read(0, torch.zeros(2, device="meta"))
        with pytest.raises(IndexError):
            file.read(1, torch.zeros(2))


def test_a_closed_file_is_not_used(disk) -> None:
    file = TensorFile(disk, [16])
    request = file.write(0, torch.ones(4))
    file.close()
    request.wait()
    with pytest.raises(UnsupportedError, match="it was closed"):
        file.read(0, torch.ones(4))


# ------------------------------------------------------------------------------------------ other processes

KILLED = """
    import os, signal, sys, torch
    from colossal._src.offload import TensorFile, scratch_file
    if sys.argv[2] == "named":
        del os.O_TMPFILE
    if sys.argv[2] == "kept":
        del os.O_TMPFILE
        def refuse(self, missing_ok=False):
            raise OSError("busy")
        scratch_file.Path.unlink = refuse
    file = TensorFile(sys.argv[1], [1 << 24])
    file.write(0, torch.zeros(1 << 24, dtype=torch.uint8))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("way", ["without a name", "named", "kept"])
def test_nothing_is_left_after_a_kill(way, disk) -> None:
    assert run(KILLED, disk, way).returncode == -signal.SIGKILL
    assert len(list(disk.iterdir())) == (way == "kept")
    for _ in range(100):  # the system may hold the file's lock a moment longer, while it drops what was under way
        with TensorFile(disk, [4]):  # a start removes what had to keep its name
            left = list(disk.iterdir())
        if not left:
            break
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("way", ["without a name", "named", "kept"])
def test_stores_that_share_a_directory_do_not_share_a_file(way, disk, monkeypatch) -> None:
    if way != "without a name":
        monkeypatch.delattr(os, "O_TMPFILE")
    real = Path.unlink
    if way == "kept":

        def refuse(*_: object, **__: object) -> None:
            raise OSError("busy")

        monkeypatch.setattr(scratch_file.Path, "unlink", refuse)
    with TensorFile(disk, [8]) as first:
        first.write(0, torch.ones(2)).wait()
        monkeypatch.setattr(scratch_file.Path, "unlink", real)
        with TensorFile(disk, [8]) as second:  # takes the first for one that is in use
            assert len(list(disk.iterdir())) == (way == "kept")
            second.write(0, torch.zeros(2)).wait()
            back = torch.zeros(2)
            first.read(0, back).wait()
    assert back.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 warns of a fork beside threads
def test_a_forked_process_leaves_the_file_alone(engine, disk) -> None:
    file = TensorFile(disk, [4 * SPAN], engine)
    request = file.write(0, noise(4 * SPAN))
    child = os.fork()
    if not child:
        status = 0
        for use in (request.wait, lambda: file.read(0, torch.zeros(1)), lambda: request.is_done):
            try:
                use()
                status = 1
            except UnsupportedError:
                pass
        file.close()
        del file, request
        gc.collect()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    request.wait()
    back = torch.zeros(4 * SPAN, dtype=torch.uint8)
    file.read(0, back).wait()
    file.close()
    assert torch.equal(back, noise(4 * SPAN))


# ------------------------------------------------------------------------------------------ states


def test_states_are_visited_in_order_and_written_back(engine, disk) -> None:
    numels = [5, 0, 100_000, 17, 1]
    with StateStore(disk, numels, engine=engine) as store:
        for turn in range(3):
            seen = []
            for index, tensors in store.walk([3, 0, 1, 2]):
                seen.append(index)
                for number, tensor in enumerate(tensors):
                    assert tensor.tolist() == [turn * (index + 1) * (number + 1)] * numels[index]
                    tensor.add_((index + 1) * (number + 1))
            assert seen == [3, 0, 1, 2]
        assert [one.tolist() for one in store.load(3)] == [[12.0] * 17, [24.0] * 17]
        assert not store.load(4)[0].any()


def test_a_walk_that_only_reads_writes_nothing(disk) -> None:
    with StateStore(disk, [4] * 6, tensors_per_entry=1) as store:
        for _, (tensor,) in store.walk(is_read_only=True):
            tensor.fill_(1)
        assert not any(store.load(index)[0].any() for index in range(6))


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_reads_go_ahead_and_writes_stay_behind(ahead, disk, monkeypatch) -> None:
    """Proved by the order in which requests begin and are waited for."""
    log: list[str] = []
    store = StateStore(disk, [8] * 8, ahead=ahead)
    for name in ("read", "write"):
        monkeypatch.setattr(store.file, name, recorded(log, name, getattr(store.file, name)))
    for index, _ in store.walk():
        log.append(f"use {index}")
        reads = [entry for entry in log if entry.startswith("read")]
        assert len(reads) == min(index + 1 + ahead, 8)  # begun before the use
        unfinished = [i for i in range(index) if f"wait write {i}" not in log]
        assert unfinished == list(range(max(0, index - ahead), index)) or index + ahead >= 8
        assert f"wait read {index}" in log
        assert f"wait read {index + 1}" not in log
    assert [entry for entry in log if entry.startswith("use")] == [f"use {index}" for index in range(8)]
    assert {entry for entry in log if entry.startswith("wait write")} == {f"wait write {index}" for index in range(8)}
    store.close()


def recorded(log: list[str], name: str, begin: Callable) -> Callable:
    """Note when a request begins, and when somebody waits for it."""

    class Noted:
        def __init__(self, slot: int, request) -> None:
            self.slot, self.request = slot, request

        def wait(self) -> None:
            self.request.wait()
            log.append(f"wait {name} {self.slot}")

    def begin_noted(slot: int, tensor: torch.Tensor) -> Noted:
        log.append(f"{name} {slot}")
        return Noted(slot, begin(slot, tensor))

    return begin_noted


def test_memory_is_as_many_buffers_as_it_says(disk) -> None:
    with StateStore(disk, [8, 4096, 1], ahead=3) as store:
        addresses = {tensors[0].data_ptr() for _ in range(3) for _, tensors in store.walk()}
        assert len(addresses) <= 7
        assert store.num_buffer_bytes == 7 * 2 * 4096 * 4
        assert all(address % 4096 == 0 for address in addresses)


@pytest.mark.parametrize("turn", [0, 3, 7])
def test_a_body_that_raises_leaves_its_own_entry_alone(engine, turn, disk) -> None:
    def spoil(store: StateStore) -> None:
        for index, tensors in store.walk():
            tensors[0].fill_(1)
            if index == turn:
                raise ZeroDivisionError

    with StateStore(disk, [50_000] * 8, engine=engine) as store:
        with pytest.raises(ZeroDivisionError):
            spoil(store)
        gc.collect()
        assert [bool(store.load(index)[0].any()) for index in range(8)] == [index < turn for index in range(8)]
        assert [index for index, _ in store.walk()] == list(range(8))


def test_a_loop_that_is_left(disk) -> None:
    with StateStore(disk, [4] * 8) as store:
        for index, tensors in store.walk():
            tensors[0].fill_(1)
            if index == 2:
                break
        assert [bool(store.load(index)[0].any()) for index in range(8)] == [True, True] + [False] * 6


def test_a_read_that_fails_ends_the_walk(engine, disk) -> None:
    seen = []

    def visit() -> None:
        for index, _ in store.walk():
            seen.append(index)

    with StateStore(disk, [SPAN // 4] * 6, engine=engine) as store:
        os.ftruncate(store.file._flights.file.buffered, 6 * SPAN)
        with pytest.raises(CheckpointError, match="must be read in full"):
            visit()
        assert seen == [0, 1, 2]
        assert store.load(0)


def test_a_write_that_fails_ends_the_walk(disk, monkeypatch) -> None:
    with StateStore(disk, [8] * 6) as store:
        fail_writes(store, monkeypatch)
        with pytest.raises(CheckpointError, match="a write failed"):
            for _ in store.walk():
                pass
        assert store.load(0)


def test_a_write_that_fails_behind_a_loop_that_was_left_is_told_by_the_next_use(disk, monkeypatch) -> None:
    with StateStore(disk, [8] * 6) as store:
        with monkeypatch.context() as patch:
            fail_writes(store, patch)
            for index, _ in store.walk():
                if index == 1:
                    break
        with pytest.raises(CheckpointError, match="a write failed"):
            store.load(0)
        assert store.load(0)


def fail_writes(store: StateStore, monkeypatch) -> None:
    class Failed:
        def wait(self) -> None:
            raise CheckpointError("a write failed")

    monkeypatch.setattr(store.file, "write", lambda _slot, _tensor: Failed())


def test_an_entry_for_a_checkpoint(engine, disk) -> None:
    with StateStore(disk, [6, 3], tensors_per_entry=3, engine=engine) as store:
        store.store(
            1, [torch.ones(3), torch.ones(3, dtype=torch.float64) * 2, torch.nn.Parameter(torch.ones(3, 1) * 3)]
        )
        store.store(0, [torch.arange(6).view(2, 3)] * 3)
        found = store.load(1)
        store.store(1, [torch.zeros(3)] * 3)
        assert [one.tolist() for one in found] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
        assert store.load(0)[2].tolist() == [0, 1, 2, 3, 4, 5]
        assert len(store) == 2


def test_states_refuse_what_cannot_work(disk) -> None:
    with StateStore(disk, [2, 2]) as store:
        for indices in ([0, 0], [2], [-1]):
            with pytest.raises(ConfigError, match="at most once"):
                store.walk(indices)
        with pytest.raises(ShapeError, match="takes 2 tensors of 2 elements"):
            store.store(0, [torch.ones(2)])
        with pytest.raises(ShapeError, match="takes 2 tensors of 2 elements"):
            store.store(0, [torch.ones(2), torch.ones(3)])
        for _ in store.walk():
            with pytest.raises(ConfigError, match="a walk has not ended"):
                store.load(0)
    for numels, tensors, ahead in (([-1], 1, 1), ([1], 0, 1), ([1], 1, 0)):
        with pytest.raises(ConfigError, match="A store of states has"):
            StateStore(disk, numels, tensors, ahead)


def test_a_store_of_nothing(disk) -> None:
    with StateStore(disk, []) as store:
        assert list(store.walk()) == []


def test_a_probe_leaves_the_random_numbers_alone(disk, monkeypatch) -> None:
    monkeypatch.setattr("colossal._src.offload.direct_io._FOUND", {})
    monkeypatch.setattr("colossal._src.offload.tensor_file._WORTH_A_PROBE", 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        with TensorFile(disk, [2**20]):
            assert torch.equal(torch.rand(3), expected)
