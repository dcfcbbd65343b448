# pyright: reportInvalidTypeForm=false, reportReturnType=false
"""``colossal run`` over SSH when something goes wrong: everything ends everywhere, and the reason is told."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.slow

FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("about to fail", file=sys.stderr)
    sys.exit(7)
time.sleep(600)
"""

RAISING = """
import torch
import torch.distributed as dist
import colossal
mesh = colossal.launch_from_torch(verbose=False)
for step in range(100):
    if mesh.global_rank == 1 and step == 2:
        raise ValueError("the loss is not finite")
    dist.all_reduce(torch.ones(()))
"""

KILLED = RAISING.replace(
    'raise ValueError("the loss is not finite")', "__import__('os').kill(__import__('os').getpid(), 9)"
)

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.waitpid(child, 0)  # so that there is a grandchild
os.write(1, b"up\\n")  # in one piece, unlike print
time.sleep(600)
"""


def wait_for(process: "subprocess.Popen[str]", line: str, times: int) -> None:
    """Read the output until a line has come that often."""
    found, alarm = 0, threading.Timer(60, process.kill)
    alarm.start()
    try:
        for text in process.stdout:
            found += line in text
            if found == times:
                return
    finally:
        alarm.cancel()
        alarm.join()
    raise AssertionError(process.stderr.read())


def last_words(errors: str) -> str:
    """What `colossal run` itself said at the end."""
    return errors[errors.index("colossal run:") :]


def test_one_failure_ends_all_nodes_and_is_told_last(cluster, program, tmp_path) -> None:
    code, _, errors = cluster.run("--host", "node1,node2", str(program(FAILING)), folder=tmp_path)
    assert code == 1
    first, second, third, *rest = last_words(errors).splitlines()
    assert first == "colossal run: node2 (node 1) failed with exit code 1, and so the job was ended on all nodes."
    assert second == "it printed:"
    assert third == "    about to fail"
    assert rest == ["node1 (node 0) was ended"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RAISING, "rank 1 raised:\n(    .*\n)+    ValueError: the loss is not finite\n"),
        (KILLED, "rank 1 was killed by SIGKILL.\n"),
    ],
)
def test_the_node_at_fault_is_found_among_those_that_only_lost_it(text, told, cluster, program, tmp_path) -> None:
    code, _, errors = cluster.run("--host", "node1,node2", str(program(text)), folder=tmp_path)
    assert code == 1
    words = last_words(errors)
    assert words.startswith("colossal run: node2 (node 1) ")
    assert re.search(told, words), words
    assert re.search(r"node1 \(node 0\) .*, after it had lost a peer", words), words


@pytest.fixture
def running(cluster, program, tmp_path) -> "subprocess.Popen[str]":
    """A job on two nodes whose ranks do not listen to signals and have children of their own."""
    words = ["--host", "node1,node2", "--nproc_per_node", "2", "--timeout", "5", str(program(STUBBORN))]
    process = cluster.start(*words, folder=tmp_path)
    try:
        wait_for(process, "up", 4)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_there_is_something_to_be_left_behind(running, cluster) -> None:
    for node in cluster.nodes[:2]:
        found = "\n".join(cluster[node.name].processes().values())
        assert found.count("program.py") >= 4 + 1, found  # ranks, their grandchildren, torchrun
        assert found.count("sleep 600") == 2, found
    assert running.poll() is None


@pytest.fixture
def hangup() -> Iterator[None]:
    """What starts these tests may ignore hang-ups, as nohup does, and whoever is started by them inherits that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everything_everywhere(number, code, running, cluster) -> None:
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == code
    assert last_words(errors).strip() == f"colossal run: {number.name} ended the job on all nodes."
    assert not any(node.processes() for node in cluster.nodes)


def test_a_second_signal_does_not_wait(running, cluster) -> None:
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert not any(node.processes() for node in cluster.nodes)


def test_a_launcher_that_is_killed_leaves_nothing_running(running, cluster) -> None:
    running.kill()
    assert not any(node.wait_until_empty() for node in cluster.nodes)


def numbers_of(machine, part: str) -> list[int]:
    """The processes on a machine whose command line has that part, in the order in which they were started."""
    return sorted(pid for pid, text in machine.all_processes().items() if part in text)


@pytest.mark.parametrize(
    ("part", "which", "number"),
    [
        ("import sys;source", 0, signal.SIGKILL),
        ("import sys;source", 0, signal.SIGTERM),
        ("import sys;source", 1, signal.SIGKILL),
        ("import sys;source", 1, signal.SIGTERM),
        ("sshd: root", 0, signal.SIGKILL),
    ],
)
def test_a_supervisor_its_guard_or_the_connection_that_dies_ends_the_job(part, which, number, running, cluster) -> None:
    os.kill(numbers_of(cluster["node2"], part)[which], number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode != 0
    assert last_words(errors).startswith("colossal run: node2 (node 1) ")
    assert not any(node.wait_until_empty() for node in cluster.nodes)


def test_a_node_that_is_cut_off_ends_the_job_within_the_timeout(running, cluster) -> None:
    cluster.switch("ip", "link", "set", cluster["node2"].port, "down")
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert last_words(errors).startswith(
        "colossal run: node2 (node 1) was lost, and so the job was ended on all nodes."
    )
    assert not cluster["node1"].processes()
    assert not cluster["node2"].wait_until_empty()  # it noticed by itself: it is still cut off


def test_a_launcher_that_stands_still_is_gone_for_its_nodes(running, cluster) -> None:
    running.send_signal(signal.SIGSTOP)
    assert not any(node.wait_until_empty() for node in cluster.nodes)
    running.send_signal(signal.SIGCONT)
    running.communicate(timeout=60)
    assert running.returncode != 0


TALKING = RAISING.replace('raise ValueError("the loss is not finite")', "__import__('os').write(1, b'up\\n')").replace(
    "range(100)", "range(10_000)"
)


def test_nodes_that_cannot_see_each_other_end_within_their_own_timeout(cluster, program, tmp_path) -> None:
    text = TALKING.replace("dist.all_reduce", "import time; time.sleep(0.01); dist.all_reduce")
    variables = {"COLOSSAL_TIMEOUT_SECONDS": "6"}
    process = cluster.start("--host", "node1,node2", str(program(text)), folder=tmp_path, env=variables)
    try:
        wait_for(process, "up", 1)
        for name in ("node1", "node2"):  # both still see the launcher
            cluster.switch("bridge", "link", "set", "dev", cluster[name].port, "isolated", "on")
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 1
    assert re.match(r"colossal run: node[12] \(node [01]\) failed with exit code 1", last_words(errors))
    assert "Timed out" in last_words(errors)


def test_output_that_nobody_reads_ends_the_job(cluster, program, tmp_path) -> None:
    text = "import time\nwhile True:\n    print('x' * 1000, flush=True)\n    time.sleep(0.01)"
    process = cluster.start("--host", "node1,node2", str(program(text)), folder=tmp_path)
    try:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
    finally:
        process.kill()
        process.stderr.close()
    assert not any(node.processes() for node in cluster.nodes)


def test_what_a_finished_job_left_running_is_ended(cluster, program, tmp_path) -> None:
    text = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('done', flush=True)"
    started = time.monotonic()
    code, output, errors = cluster.run("--host", "node1,node2", str(program(text)), folder=tmp_path)
    assert code == 0, errors
    assert output.count("done") == 2
    assert time.monotonic() - started < 60
    assert not any(node.processes() for node in cluster.nodes)
