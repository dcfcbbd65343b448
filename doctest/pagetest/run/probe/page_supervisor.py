"""The process between the harness and a page: `page_supervisor.py COMMAND ...` runs a command and ends as it does.

A page that sends a signal to its parent meets this process, dies with it or outlives it, and fails
either way; the harness goes on.
"""

import os
import signal
import sys
from typing import NoReturn

FATAL_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM)
NOT_FOUND = 127


def fork_supervised() -> None:
    """Returns in a new process with a session of its own; this one waits for it, and ends as it does."""
    if pid := os.fork():
        _supervise(pid)
    os.setsid()


def _supervise(pid: int) -> NoReturn:
    for number in FATAL_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else NOT_FOUND)


def _main(words: list[str]) -> NoReturn:
    fork_supervised()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(words[0], words)  # noqa: S606


if __name__ == "__main__":
    _main(sys.argv[1:])
