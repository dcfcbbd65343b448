"""What ends a rank is the last that torchrun reports of it."""

import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from colossal._src import _error_file
from colossal._src._error_file import ERROR_FILE, read_error_file, report_uncaught_errors
from colossal.errors import CommunicationError, MeshError

REASON, ECHO = MeshError("Found tp 3 in a world of 2."), CommunicationError("Rank 1 has ended.")


def end_by(error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessFailure:
    """Let this process be one that an error ends, and torchrun the one that looks."""
    printed = list[object]()
    monkeypatch.setattr(_error_file, "_has_hook", False)
    monkeypatch.setattr(sys, "excepthook", lambda _kind, value, _trace: printed.append(value))
    monkeypatch.setenv(ERROR_FILE, str(path))
    for _ in range(2):  # as where a process launches again
        report_uncaught_errors()
    sys.excepthook(type(error), error, None)
    assert printed == [error]  # it stands where Python prints it, too, and once
    return ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))


def test_torchrun_ends_its_report_with_the_error_and_not_with_a_rank_that_lost_its_peer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    echo = end_by(ECHO, tmp_path / "0", monkeypatch)
    reason = end_by(REASON, tmp_path / "1", monkeypatch)
    report = str(ChildFailedError("train.py", {0: echo, 1: reason}))
    assert report.splitlines()[-2].endswith("traceback : colossal.errors.MeshError: Found tp 3 in a world of 2.")
    assert report.count("Rank 1 has ended") == 1
    assert read_error_file(tmp_path / "1") == "colossal.errors.MeshError: Found tp 3 in a world of 2."


def test_what_record_has_written_stays(tmp_path, monkeypatch) -> None:
    (tmp_path / "0").write_text('{"message": "mine"}', encoding="utf-8")
    end_by(REASON, tmp_path / "0", monkeypatch)
    assert read_error_file(tmp_path / "0") == "mine"


@pytest.mark.parametrize("content", ["", "[]", '{"message": {}}', '{"error": 1}'])
def test_other_files_have_no_message(content: str, tmp_path: Path) -> None:
    (tmp_path / "0").write_text(content, encoding="utf-8")
    assert read_error_file(tmp_path / "0") == read_error_file(tmp_path / "none") == ""


def test_without_torchrun_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    before = sys.excepthook
    report_uncaught_errors()
    assert sys.excepthook is before
