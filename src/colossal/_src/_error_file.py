"""The error that ends a rank, in the file that torchrun gives each of them: the report of a job then ends with it."""

import json
import math
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["ERROR_FILE", "read_error_file", "report_uncaught_errors"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun, and what it is started by, looks for the error of a process."""

_has_hook = False  # torch puts one of its own around ours, at each launch


def report_uncaught_errors() -> None:
    """Write what ends this process into its error file, unless torch's own `record` has; without torchrun do nothing.

    The traceback stays where Python prints it: in the report it would come between the reader and the message.
    """
    global _has_hook
    if not os.environ.get(ERROR_FILE) or _has_hook:
        return
    previous, _has_hook = sys.excepthook, True

    def write_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(OSError):  # a full disk: the message itself matters more
            _write(Path(os.environ[ERROR_FILE]), error)
        previous(kind, error, trace)

    sys.excepthook = write_and_print


def _write(path: Path, error: BaseException) -> None:
    from colossal._src._lost_peer import LOST_PEER  # compiles a pattern, which most programs do not need

    message = "".join(traceback.format_exception_only(error)).strip()
    # torchrun compares whole seconds, and takes the lowest rank of the earliest: one that only lost its peer, which
    # it did after that peer's own error, must not come first.
    seconds = math.floor(time.time()) + bool(LOST_PEER.search(message))
    details = {"message": message, "extraInfo": {"timestamp": str(seconds)}}
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        json.dump({"message": details}, file)


def read_error_file(path: Path) -> str:
    """Return the message of an error file; empty if there is none, or one of another form."""
    try:
        message: Any = json.loads(path.read_text(encoding="utf-8"))["message"]
        return message if isinstance(message, str) else str(message["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
