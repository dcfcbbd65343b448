"""Saving goes on while training does; what it saves is the state at the call, and its errors are heard."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal._src.checkpoint_io import file_writers
from colossal.booster import Booster
from colossal.checkpoint_io import CheckpointIO, ProcessGroupIO
from colossal.errors import CheckpointError
from colossal.testing import WorldError, run_processes

pytestmark = pytest.mark.slow

ASYNC: dict[str, Any] = {"use_safetensors": True, "use_async": True}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the writing of blocks until the event is set."""
    event = threading.Event()
    write = file_writers.SafetensorsWriter._write_blocks

    def wait_and_write(self: file_writers.SafetensorsWriter, *arguments: Any) -> Any:
        assert event.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(file_writers.SafetensorsWriter, "_write_blocks", wait_and_write)
    yield event
    event.set()


def linear(value: float) -> nn.Linear:
    model = nn.Linear(50, 40)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


@pytest.mark.parametrize("shard", [False, True])
def test_it_returns_before_writing_and_saves_what_was_there(tmp_path: Path, gate: threading.Event, shard: bool) -> None:
    io, model = CheckpointIO(), linear(1.0)
    io.save_model(model, tmp_path / "model", shard=shard, **ASYNC)
    assert not list(tmp_path.glob("model/*.json")) + [p for p in tmp_path.glob("model") if p.is_file()]
    nn.init.constant_(model.weight, 2.0)
    gate.set()
    io.synchronize()
    assert io.load_model(linear(0.0), tmp_path / "model").weight.unique().tolist() == [1.0]


def test_the_format_of_torch_is_copied_too(tmp_path: Path) -> None:
    io, model = CheckpointIO(), nn.Sequential(linear(1.0), nn.Linear(40, 50))
    model[1].weight = nn.Parameter(torch.ones(100, 40)[:50])  # part of larger memory
    io.save_model(model, tmp_path / "model.pt", use_async=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    io.synchronize()
    assert all((value == 1).all() for name, value in torch.load(tmp_path / "model.pt").items() if "1.bias" not in name)


def test_saves_are_written_in_order_and_loading_waits(tmp_path: Path) -> None:
    io, model = CheckpointIO(), linear(0.0)
    for value in range(1, 6):
        nn.init.constant_(model.weight, value)
        io.save_model(model, tmp_path / "model", shard=True, **ASYNC)
        io.save_plain(lambda: {"value": value}, tmp_path / "plain", use_async=True)  # noqa: B023 - read at once
    assert io.load_model(linear(0.0), tmp_path / "model").weight.unique().tolist() == [5.0]
    assert io.load_plain(tmp_path / "plain") == {"value": 5}
    nn.init.constant_(model.weight, 6.0)
    io.save_model(model, tmp_path / "model", shard=True, **ASYNC)
    nn.init.constant_(model.weight, 7.0)
    io.save_model(model, tmp_path / "model", shard=True, use_safetensors=True)
    assert io.load_model(linear(0.0), tmp_path / "model").weight.unique().tolist() == [7.0]


def test_copies_do_not_fill_the_memory(tmp_path: Path, gate: threading.Event) -> None:
    io, model = CheckpointIO(), nn.Linear(600, 600)
    threads = [
        threading.Thread(target=io.save_model, args=(model, tmp_path / str(number)), kwargs=ASYNC)
        for number in range(3)
    ]
    for thread, seconds in zip(threads, (60.0, 60.0, 1.0), strict=True):
        thread.start()
        thread.join(seconds)
    assert [thread.is_alive() for thread in threads] == [False, False, True], "the third waits for the first"
    gate.set()
    threads[2].join()
    io.synchronize()
    assert len(io._save_queue._arenas._free) <= 2, "memory is used again"


def test_another_one_waits_for_what_is_being_written(tmp_path: Path, gate: threading.Event) -> None:
    booster, other = Booster(device="cpu"), Booster(device="cpu")
    model: Any = linear(1.0)
    booster.save(tmp_path / "steps", model, None, step=7, use_async=True)
    booster.save_model(model, tmp_path / "model", **ASYNC)
    threading.Timer(0.2, gate.set).start()
    assert other.latest_step(tmp_path / "steps") == 7
    loaded: Any = linear(0.0)
    other.load_model(loaded, tmp_path / "model")
    assert loaded.weight.unique().tolist() == [1.0]
    booster.checkpoint_io.synchronize()


def test_an_error_is_raised_by_the_next_call(tmp_path: Path) -> None:
    io, model = CheckpointIO(), linear(1.0)
    (tmp_path / "file").touch()
    for call in (
        lambda: io.save_model(model, tmp_path / "model", use_safetensors=True),
        lambda: io.save_optimizer(torch.optim.SGD(model.parameters()), tmp_path / "optimizer"),
        lambda: io.load_plain(tmp_path / "plain"),
        io.synchronize,
    ):
        io.save_model(model, tmp_path / "file" / "model", **ASYNC)
        while not io._save_queue._background._pending[0].done():
            time.sleep(0.001)
        with pytest.raises(CheckpointError, match="cannot be created"):
            call()
        assert not (tmp_path / "model").exists()
        io.synchronize()


ENDING = """
import sys, torch
from colossal.checkpoint_io import CheckpointIO
CheckpointIO().save_model(torch.nn.Linear(300, 300), sys.argv[1], use_safetensors=True, use_async=True)
print("the program ends")
"""


def test_a_program_waits_at_its_end_and_fails_if_the_save_did(tmp_path: Path) -> None:
    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", ENDING, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    good = run(tmp_path / "model")
    assert (good.returncode, good.stdout) == (0, "the program ends\n"), good.stderr
    assert CheckpointIO().load_model(nn.Linear(300, 300), tmp_path / "model")
    bad = run(tmp_path / "model" / "below a file")
    assert (bad.returncode, bad.stdout) == (1, "the program ends\n")
    assert "CheckpointError: Saving a checkpoint needs the directory" in bad.stderr


def _train_while_saving(folder: str) -> list[float]:
    """Communicate in training while the background does, many times."""
    io, model = CheckpointIO(ProcessGroupIO()), nn.parallel.DistributedDataParallel(linear(1.0))
    seen = []
    for step in range(20):
        io.save_model(model, Path(folder, "model"), shard=True, **ASYNC)
        model(torch.full((4, 50), float(step))).sum().backward()
        total = torch.tensor([1.0])
        dist.all_reduce(total)
        seen.append(total.item())
    io.synchronize()
    return seen


def test_training_communicates_meanwhile(tmp_path: Path) -> None:
    assert run_processes(_train_while_saving, 3, str(tmp_path)) == [[3.0] * 20] * 3
    assert CheckpointIO().load_model(linear(0.0), tmp_path / "model").weight.unique().tolist() == [1.0]


def call_until_it_raises(call: Callable[[], object]) -> None:
    for _ in range(1000):
        call()


def _fail_on_one_rank(folder: str) -> str:
    io, model = CheckpointIO(ProcessGroupIO()), linear(1.0)
    if dist.get_rank() == 1:
        os.open = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))  # this process ends soon
    io.save_model(model, Path(folder, "model"), **ASYNC)
    with pytest.raises(CheckpointError) as caught:
        call_until_it_raises(lambda: io.save_plain(dict, Path(folder, "plain"), use_async=True))
    return str(caught.value)


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    texts = run_processes(_fail_on_one_rank, 3, str(tmp_path))
    assert all("Input/output error" in text and "rank 1" in text for text in texts)
    assert all(text.count("This happened on rank") == 1 for text in texts)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def _lose_a_peer(folder: str) -> None:
    io, model = CheckpointIO(ProcessGroupIO()), linear(1.0)
    io.save_model(model, Path(folder, "model"), **ASYNC)
    io.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((CheckpointError, RuntimeError)):
        call_until_it_raises(lambda: io.save_model(linear(2.0), Path(folder, "model"), **ASYNC))
    value = CheckpointIO().load_model(linear(0.0), Path(folder, "model")).weight.unique().tolist()
    Path(folder, "seen").write_text(str(value))


def test_a_lost_peer_is_an_error_and_the_checkpoint_stays(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="1"):
        run_processes(_lose_a_peer, 2, str(tmp_path), fresh=True)
    assert (tmp_path / "seen").read_text() == "[1.0]"
