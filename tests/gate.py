"""What must hold before a change lands: ``.venv/bin/python tests/gate.py`` runs all sessions of the gate, or some.

All of them run, whatever becomes of the others. The last lines tell what refuses the change, and how to repeat it; all
that a session printed is in ``build/gate``.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from noxfile import GATE  # noqa: E402

LOGS = ROOT / "build" / "gate"
NOX = str(Path(sys.executable).with_name("nox"))

MINUTES = {"style": 3, "types": 10, "rules": 6, "tests": 38, "pages": 26}
"""After which a session is ended; together less than what CI allows."""

MOST_REASONS, LINE_LENGTH = 26, 240

_FINDING = r"^(?:\S+?:\d+|Would reformat).*"
_REASONS = {
    "types": r"^\s*\S+:\d+:\d+ - error: .*",
    "tests": r"^(?:FAILED|ERROR) .*",
    "pages": r"^FAIL .*",
}
_FLAKY = re.compile(r"^.*(?:flaky, passed when run alone: |FLAKY ).*", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|error)")


@dataclass(frozen=True)
class Outcome:
    """What became of a session."""

    name: str
    status: int | None  # None where it did not come to an end
    seconds: float
    log: str

    @property
    def word(self) -> str:
        return "passed" if self.status == 0 else "REFUSED"

    @property
    def last_run(self) -> str:
        """What was printed of the last run, where failures ran once more."""
        return self.log.rpartition("what failed runs once more, alone")[2]

    @property
    def reasons(self) -> list[str]:
        """What refuses the change, a line each."""
        if self.status is None:
            return [f"no end after {MINUTES[self.name]} minutes; the last lines:", *self._last_lines(3)]
        found = re.findall(_REASONS.get(self.name, _FINDING), self.last_run, re.MULTILINE)
        return [line.strip().replace(f"{ROOT}/", "") for line in dict.fromkeys(found)] or self._last_lines(6)

    @property
    def counts(self) -> str:
        """How many tests passed and failed in the end, if the session ran any."""
        lines = [line for line in self.log.splitlines() if re.search(r"\d+ passed|\d+ failed", line)]
        if not lines:
            return ""
        passed = max(_number(line, "passed") for line in lines)
        failed = _number(lines[-1], "failed") + _number(lines[-1], "error")
        return f"{self.name}: {passed} passed, {failed} failed"

    def _last_lines(self, count: int) -> list[str]:
        lines = [line for line in self.log.splitlines() if line.strip() and not line.startswith("nox > ")]
        return lines[-count:] or ["it printed nothing"]


def _number(line: str, word: str) -> int:
    return sum(int(number) for number, found in _COUNT.findall(line) if found == word)


def run(name: str) -> Outcome:
    """Run a session; show what it prints, and keep it."""
    start, file = time.monotonic(), LOGS / f"{name}.log"
    command = [NOX, "-R", "-s", name]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(60 * MINUTES[name], end)
        timer.start()
        assert process.stdout
        with file.open("wb") as log:
            for line in process.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
        status = process.wait()
        timer.cancel()
    text = file.read_text(encoding="utf-8", errors="replace")
    return Outcome(name, None if is_late.is_set() else status, time.monotonic() - start, text)


def tell(outcomes: Sequence[Outcome]) -> None:
    """The summary, in so few lines that the end of any log has all of them."""
    refused = [one for one in outcomes if one.status != 0]
    say("", f"{' the gate ':=^100}", "  ".join(f"{one.name} {one.word} {one.seconds:.0f} s" for one in outcomes))
    flaky = [line for one in outcomes for line in _FLAKY.findall(one.log)]
    say(*flaky[:3])
    share = max(3, MOST_REASONS // max(1, len(refused)))
    for one in refused:
        say(
            f"{one.name} REFUSED, again: .venv/bin/nox -R -s {one.name}", *(f"  {line}" for line in one.reasons[:share])
        )
        if len(one.reasons) > share:
            say(f"  and {len(one.reasons) - share} more in build/gate/{one.name}.log")
    say(*(one.counts for one in outcomes if one.counts))
    say(f"GATE REFUSED: {', '.join(one.name for one in refused)}" if refused else "GATE PASSED")


def say(*lines: str) -> None:
    """Print lines, none of them so long that it hides the next."""
    for line in lines:
        sys.stdout.write(f"{line[:LINE_LENGTH]}\n")
    sys.stdout.flush()


def main(names: Sequence[str]) -> int:
    """Run sessions; return 1 if any refuses."""
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes = [run(name) for name in names or GATE]
    tell(outcomes)
    return int(any(one.status != 0 for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
