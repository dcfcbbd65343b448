import io

import pytest

from colossal._src.cli.run import supervisor
from colossal._src.cli.run.node import Frames
from colossal._src.cli.run.outcome import Ending, FailureDiagnosis, NodeEnd, Weight, first_failure, lost, report
from colossal._src.cli.run.output import Lines, Printer
from colossal._src.cli.watchdog import ADVICE

# ------------------------------------------------------------------------------------------ frames


def sent(*frames: tuple[bytes, bytes]) -> bytes:
    stream = io.BytesIO()
    reporter = supervisor.Reporter(stream)
    for letter, content in frames:
        reporter.write(letter, content)
    return stream.getvalue()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_survive_any_cut_and_a_greeting_before_them(size) -> None:
    frames = [(b"S", b""), (b"O", b"text\0\n"), (b"B", b""), (b"X", b"{}")]
    stream = b"Welcome to node1!\n" + supervisor.MAGIC + sent(*frames)
    reader = Frames()
    found = [frame for start in range(0, len(stream), size) for frame in reader.feed(stream[start : start + size])]
    assert found == frames
    assert reader.begun
    assert reader.noise == ""


def test_what_is_no_answer_is_kept_as_a_complaint() -> None:
    reader = Frames()
    assert list(reader.feed(b"bash: /env/bin/python: No such file or directory\n")) == []
    assert not reader.begun
    assert reader.noise == "bash: /env/bin/python: No such file or directory"


# ------------------------------------------------------------------------------------------ lines


def test_lines_are_put_together_from_pieces() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\r\n\nthr\xc3") == ["two", ""]
    assert lines.feed(b"\xa9e\xff\n") == ["thrée\ufffd"]


def test_a_progress_bar_is_shown_as_it_is_now() -> None:
    lines = Lines()
    assert lines.feed(b"\r10%\r20%") == []
    assert lines.stale(3600.0) == []
    assert lines.stale(0.0) == ["20%"]
    assert lines.stale(0.0) == []
    assert lines.feed(b"\r100%\n") == ["100%"]


def test_the_newline_of_a_line_that_was_shown_makes_no_empty_line() -> None:
    lines = Lines()
    lines.feed(b"loading")
    assert lines.stale(0.0) == ["loading"]
    assert lines.feed(b"\nnext\n\n") == ["next", ""]


def test_each_line_says_its_node_and_goes_where_it_came_from(capsys) -> None:
    printer = Printer(["a", "node2"])
    printer.write(0, "x")
    printer.write(1, "y", error=True)
    output, errors = capsys.readouterr()
    assert output == "a     | x\n"
    assert errors == "node2 | y\n"


# ------------------------------------------------------------------------------------------ evidence

RAISED = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
[rank1]:     step()
[rank1]: ValueError: the loss is not finite"""
LOST = """[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 8, in <module>
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:26004."""
FAILED = (
    "E1121 19:31:32.770000 13599 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) "
    "local_rank: 0 (pid: 13764) of binary: python"
)
TABLE = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_19:20:17
  rank      : 3 (local_rank: 1)
  exitcode  : {} (pid: 7044)  ({})"""


def evidence(*texts: str) -> FailureDiagnosis:
    found = FailureDiagnosis()
    for line in "\n".join(texts).splitlines():
        found.add(line)
    return found


def test_an_error_of_a_ranks_own_weighs_more_than_a_lost_peer() -> None:
    cause = evidence(LOST, "something else", RAISED, FAILED.format(1)).cause()
    assert (cause.weight, cause.title) == (Weight.CAUSE, "rank 1 raised")
    assert cause.lines[0] == "Traceback (most recent call last):"
    assert cause.lines[-1] == "ValueError: the loss is not finite"
    assert evidence(LOST).cause().weight is Weight.ECHO


def test_a_signal_is_a_cause_unless_we_sent_it() -> None:
    cause = evidence(LOST, FAILED.format(-9), TABLE.format(-9, "SIGKILL")).cause()
    assert (cause.weight, cause.title) == (Weight.CAUSE, "rank 3 was killed by SIGKILL")
    assert evidence(LOST, FAILED.format(-15), TABLE.format(-15, "SIGTERM")).cause().weight is Weight.ECHO


WATCHDOG = (
    "[rank3]:[E1016 03:31:38.928019586 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=9141, OpType=_ALLGATHER_BASE, NumelIn=19008, NumelOut=152064, Timeout(ms)=600000) ran "
    "for 600071 milliseconds before timing out.\n"
    "[rank3]:[E1016 03:31:38.929246900 ProcessGroupNCCL.cpp:627] [Rank 3] To avoid data inconsistency, we are taking "
    "the entire process down.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'"
)
ABORTED = (FAILED.format(-6), TABLE.format(-6, "SIGABRT"))


def test_a_rank_that_its_watchdog_ended_has_lost_a_peer_and_is_told_what_to_do() -> None:
    cause = evidence(WATCHDOG, *ABORTED).cause()
    assert cause.weight is Weight.ECHO
    assert cause.title == (
        "rank 3 lost a peer, or waited for one longer than the timeout, and its watchdog ended it (SIGABRT)"
    )
    assert cause.lines[0].startswith("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9141")
    assert cause.lines[-1] == ADVICE
    assert "COLOSSAL_TIMEOUT_SECONDS" in ADVICE
    assert evidence(WATCHDOG.replace("NCCL", "XCCL"), *ABORTED).cause().weight is Weight.ECHO


def test_the_peer_that_it_lost_weighs_more() -> None:
    cause = evidence(WATCHDOG, RAISED, *ABORTED).cause()
    assert (cause.weight, cause.title) == (Weight.CAUSE, "rank 1 raised")
    killed = end(1, Ending.FAILED, 1, FAILED.format(-9), TABLE.format(-9, "SIGKILL"))
    assert first_failure([end(0, Ending.FAILED, 1, WATCHDOG, *ABORTED), killed]) is killed


def test_a_watchdog_that_met_an_error_of_the_device_or_none_at_all_tells_of_a_crash() -> None:
    broken = WATCHDOG.replace(
        "collective operation timeout", "terminated with exception: CUDA error: an illegal access"
    )
    broken = broken.replace("Watchdog caught", "Process group watchdog thread")
    cause = evidence(broken, *ABORTED).cause()
    assert (cause.weight, cause.title) == (
        Weight.CAUSE,
        "rank 3 was ended by its watchdog (SIGABRT) after an error of its device",
    )
    cause = evidence("free(): invalid pointer", *ABORTED).cause()
    assert (cause.weight, cause.title) == (Weight.CAUSE, "rank 3 was killed by SIGABRT")
    assert evidence(WATCHDOG, FAILED.format(-9), TABLE.format(-9, "SIGKILL")).cause().weight is Weight.CAUSE


def test_without_a_traceback_the_last_lines_stand_for_the_cause_without_torchruns_own() -> None:
    warning = "[W1121 19:33:42.581895812 socket.cpp:207] [c10d] The hostname cannot be retrieved."
    cause = evidence("train.py: error: no --data", warning, FAILED.format(2), "Traceback of torchrun", "====").cause()
    assert (cause.weight, cause.lines) == (Weight.UNKNOWN, ("train.py: error: no --data",))


def test_what_failed_before_a_restart_is_forgotten() -> None:
    later = RAISED.replace("rank1", "rank0").replace("the loss is not finite", "later")
    cause = evidence(RAISED, FAILED.format(1), later, FAILED.format(1)).cause()
    assert cause.title == "rank 0 raised"
    assert cause.lines[-1] == "ValueError: later"


# ------------------------------------------------------------------------------------------ outcome


def end(node: int, ending: Ending, status: int, *texts: str) -> NodeEnd:
    return NodeEnd(node, f"node{node}", ending, status, evidence(*texts).cause())


def test_the_node_at_fault_comes_first() -> None:
    ends = [end(0, Ending.FAILED, 1, LOST), end(1, Ending.ENDED, -15, RAISED), end(2, Ending.DONE, 0)]
    assert first_failure(ends) is ends[1]
    assert report(ends).splitlines() == [
        "node1 (node 1) failed, and so the job was ended on all nodes.",
        "rank 1 raised:",
        "    Traceback (most recent call last):",
        '      File "train.py", line 7, in <module>',
        "        step()",
        "    ValueError: the loss is not finite",
        "node0 (node 0) failed with exit code 1, after it had lost a peer",
    ]


def test_nobody_is_at_fault_in_a_job_that_went_well() -> None:
    assert report([end(0, Ending.DONE, 0), end(1, Ending.DONE, 0)]) == ""


def test_a_signal_says_what_it_could_not_end() -> None:
    ends = [end(0, Ending.ENDED, -15), lost(1, "node1", "It did not answer when the job was ended.")]
    assert report(ends, "SIGINT").splitlines() == [
        "SIGINT ended the job on all nodes.",
        "node1 (node 1) was lost: It did not answer when the job was ended.",
    ]


def test_an_exit_code_is_that_of_a_shell() -> None:
    assert end(0, Ending.FAILED, 3).exit_code == 3
    assert end(0, Ending.FAILED, -9).exit_code == 137
    assert end(0, Ending.FAILED, -9).sentence == "node0 (node 0) was ended by SIGKILL"
