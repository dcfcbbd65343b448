"""``colossal run`` without SSH: one node, and several on one machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from colossal._src.cli.run import command

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[3] / "src"
TWO = ("--host", "localhost,127.0.0.1", "--master_port")


def restore_interrupt() -> None:
    """Let a child take Ctrl-C, even where this process was started with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts ``colossal run`` in the folder of the test."""
    processes = []

    def _start(*words: str, before: Callable[[], None] = restore_interrupt) -> "subprocess.Popen[str]":
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "colossal.cli", "run", *words],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=before,  # noqa: PLW1509 (it takes no lock)
            )
        )
        return processes[-1]

    yield _start
    for process in processes:
        process.kill()
        process.communicate()
    assert not running_in(tmp_path)


def running_in(folder: Path, seconds: float = 20.0) -> list[str]:
    """What still runs in a folder when nothing should any more."""
    deadline = time.monotonic() + seconds
    while (found := list(_running_in(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _running_in(folder: Path) -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue


def test_one_node_has_the_terminal_to_itself_and_its_exit_code_is_passed_on(start, program) -> None:
    path = program(
        "import os, sys\n"
        "names = 'RANK WORLD_SIZE MASTER_ADDR'.split()\n"
        "os.write(1, (' '.join([os.environ[name] for name in names] + sys.argv[1:]) + '\\n').encode())\n"
        "if sys.argv[1:2] == ['--input']: os.write(1, sys.stdin.readline().upper().encode())\n"
        "sys.exit(sys.argv[1:2] == ['--fail'])\n"
    )
    process = start("--nproc-per-node", "2", str(path), "--nproc_per_node", "x")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(output.splitlines()) == ["0 2 127.0.0.1 --nproc_per_node x", "1 2 127.0.0.1 --nproc_per_node x"]
    process = start(str(path), "--input")
    assert process.communicate("typed\n", timeout=60)[0] == "0 1 127.0.0.1 --input\nTYPED\n"
    process = start(str(path), "--fail")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ChildFailedError" in errors  # torchrun's own report
    assert "colossal run:" not in errors


def test_one_node_ends_with_the_error_of_the_rank_that_failed(start, program) -> None:
    path = program("import colossal\ncolossal.launch_from_torch(verbose=False)\nraise ValueError('Found\\nmore.')\n")
    process = start("--nproc-per-node", "2", str(path))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.endswith("colossal run: ValueError: Found\nmore.\n")
    assert errors.index("ChildFailedError") < errors.index("colossal run:")
    assert "]: ValueError: Found" in errors  # with its traceback, where it was raised


def wait_for(process: "subprocess.Popen[str]", line: str) -> None:
    alarm = threading.Timer(60, process.kill)
    alarm.start()
    try:
        assert any(line in text for text in process.stdout)
    finally:
        alarm.cancel()
        alarm.join()


SLEEPING = (
    "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.fork()\nos.write(1, b'up\\n')\ntime.sleep(600)"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_one_node_ends_with_its_launcher(number, start, program, tmp_path) -> None:
    process = start(str(program(SLEEPING)))
    wait_for(process, "up")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert not running_in(tmp_path)


def ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_a_launcher_that_was_started_with_interrupts_ignored_goes_on(start, program) -> None:
    process = start(str(program("import os, time\nos.write(1, b'up\\n')\ntime.sleep(2)\n")), before=ignore_interrupt)
    wait_for(process, "up")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


RAISING = """
import torch
import torch.distributed as dist
import colossal
mesh = colossal.launch_from_torch(verbose=False)
dist.all_reduce(torch.ones(()))
if mesh.global_rank == 1:
    raise ValueError("the loss is not finite")
dist.all_reduce(torch.ones(()))
"""


def test_two_nodes_on_one_machine_fail_with_the_reason_last(start, program, free_port) -> None:
    process = start(*TWO, str(free_port), str(program(RAISING)))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    first, second, *rest = errors[errors.index("colossal run:") :].splitlines()
    assert first.startswith("colossal run: 127.0.0.1 (node 1) failed")
    assert second == "rank 1 raised:"
    assert "    ValueError: the loss is not finite" in rest


ONCE = """
import os, pathlib, signal
import torch
import torch.distributed as dist
import colossal

mesh = colossal.launch_from_torch(verbose=False, timeout_seconds=30)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(3):
    total = torch.ones(())
    dist.all_reduce(total)
    if step == 1 and mesh.global_rank == attempt < 2:
        os.kill(os.getpid(), signal.SIGKILL)
os.write(1, f"sum {total.item()} in attempt {attempt}\\n".encode())
"""


ABORTING = """
import os, sys, time
import torch
import colossal
mesh = colossal.launch_from_torch(verbose=False)
torch.distributed.barrier()
if mesh.global_rank:
    time.sleep(600)
words = ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE)",
         "To avoid data inconsistency, we are taking the entire process down.")
for text in words:
    print(f"[rank0]:[E1016 03:31:38.928019586 ProcessGroupNCCL.cpp:607] [Rank 0] {text}", file=sys.stderr, flush=True)
os.abort()
"""


def test_a_rank_that_a_watchdog_aborts_is_told_as_one_that_lost_a_peer(start, program, free_port) -> None:
    process = start(*TWO, str(free_port), str(program(ABORTING)))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    words = errors[errors.index("colossal run:") :]
    assert (
        "rank 0 lost a peer, or waited for one longer than the timeout, and its watchdog ended it (SIGABRT):" in words
    )
    assert "    [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8" in words
    assert "torchfrtrace" in words


@pytest.mark.parametrize(
    ("is_cpu", "told"), [(True, ""), (False, "colossal run: If a rank above ended with exit code -6")]
)
def test_one_node_on_an_accelerator_says_what_an_abort_means(is_cpu, told, tmp_path, monkeypatch) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr("colossal.accelerator.get_accelerator", lambda: SimpleNamespace(is_cpu=is_cpu))
    found = CliRunner().invoke(command, ["--workdir", str(tmp_path), "program.py"])
    assert found.exit_code == 1
    assert found.stderr.startswith(told)
    assert bool(found.stderr) is bool(told)


def test_one_node_restarts_its_ranks_and_they_meet_again(start, program) -> None:
    words = ["--nproc_per_node", "2", "--extra_launch_args", "max_restarts=2", str(program(ONCE))]
    process = start(*words)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert output.splitlines() == ["sum 2.0 in attempt 2"] * 2
    assert "Connection refused" not in errors  # nobody called a process of an earlier attempt


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, words)
    return result.exit_code, result.output


def test_a_dry_run_shows_what_would_be_started() -> None:
    code, output = run(
        "--host", "198.51.100.1,198.51.100.2", "--nproc-per-node", "8", "--workdir", "/my job", "--env", "A=b c",
        "--python", "/env/bin/python", "--master-addr", "198.51.100.1", "--dry-run", "train.py", "--lr", "1",
    )  # fmt: skip
    assert code == 0, output
    first, second = output.splitlines()
    assert first.startswith("198.51.100.1: cd '/my job' && env ")
    assert "'A=b c'" in first
    assert second.endswith(
        "/env/bin/python -m torch.distributed.run --nnodes=2 --nproc_per_node=8 --node_rank=1 "
        "--master_addr=198.51.100.1 --master_port=29500 train.py --lr 1"
    )


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--host", "a", "--hostfile", "b", "x.py"], "Found both --host and --hostfile"),
        (["--include", "a", "x.py"], "Found no hosts"),
        (["--num_nodes", "2", "x.py"], "Found no hosts"),
        (["--nproc_per_node", "none", "x.py"], "Found 'none'"),
        (["--timeout", "1", "x.py"], "1.0 is not in the range"),
        (["--extra-launch-args", "nnodes=2", "x.py"], "Found nnodes"),
        ([], "Missing argument 'PROGRAM'"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_usage(words, found) -> None:
    code, output = run(*words)
    assert code == 2
    assert output.startswith("Usage:")
    assert found in output


def test_a_program_that_is_not_there_is_told(start) -> None:
    process = start("missing.py")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Every node needs the program missing.py. Found none in" in errors
