"""Tensors come back from a scratch file, by each engine, past the page cache or through it, and in any process."""

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_files import SPAN, WAYS, aligned, allowed, noise

from colossal._src.offload import DirectIO, TensorFile, direct_io, io_engine, scratch_file
from colossal._src.offload.io_engine import FileTransfer, open_io_engine
from colossal._src.offload.scratch_file import ScratchFile
from colossal.errors import UnsupportedError

pytestmark = pytest.mark.slow

SIZES = (0, 1, 511, 4096, 4097, 1_000_003, SPAN, 2 * SPAN + 4096, 3 * SPAN + 77)


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


def test_a_probe_leaves_the_random_numbers_alone(disk, monkeypatch) -> None:
    monkeypatch.setattr("colossal._src.offload.direct_io._FOUND", {})
    monkeypatch.setattr("colossal._src.offload.tensor_file._WORTH_A_PROBE", 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        with TensorFile(disk, [2**20]):
            assert torch.equal(torch.rand(3), expected)
