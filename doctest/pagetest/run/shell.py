"""Runs the transcripts of a page: one shell, in which line N is line N of the Markdown."""

import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetest.model.page import Page
from pagetest.outputs.blocks import printed_by_block
from pagetest.run.command import CommandOutcome
from pagetest.run.failure import Failure
from pagetest.run.session import Session

# [Note: one shell]
# A reader pastes the blocks into one terminal, so one shell runs them all, and variables, functions and the folder
# last from block to block. Files of the page are written where they stand between the blocks. The line of an opening
# fence becomes a call that notes how much has been printed so far. The first command that fails ends the page; one
# that is meant to fail says so: `command || echo "exit code $?"`.

_PRELUDE = (
    "set -eE -o pipefail",
    """trap 'echo "$? $LINENO" > "$__page/failed"' ERR""",
    """__page_block() { echo "$1 $(stat -c %s "$__page/log")" >> "$__page/marks"; }""",
)
_ENVIRONMENT = {
    "TERM": "dumb",
    "COLUMNS": "120",
    "PIP_NO_INDEX": "1",
    "no_proxy": "localhost,127.0.0.1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a warning that a store has closed depends on which process ends first
}
_NOWHERE = "http://127.0.0.1:9"  # the port that discards: what would load something says at once that it cannot
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_LINE = re.compile(r"^\S+: line (\d+): ", re.MULTILINE)


@dataclass(frozen=True)
class ShellRun:
    """How the transcripts of a page went."""

    outcome: CommandOutcome
    printed: Mapping[int, str]  # by the line of the block
    failure: Failure | None
    log: bytes

    @property
    def seconds(self) -> float:
        """How long they took."""
        return self.outcome.seconds


def run_shell(
    page: Page, folder: Path, environment: Mapping[str, str], reports: Path, limit_seconds: float, **options: Any
) -> ShellRun:
    """Writes the files and runs the commands of a page in a folder; what is noted meanwhile is kept in `reports`."""
    own = reports / "shell"
    own.mkdir()
    script = own / f"{page.stem}.sh"
    script.write_text(shell_script(page, own), encoding="utf-8")
    (own / "marks").touch()
    added = {**_ENVIRONMENT, **dict.fromkeys(_PROXIES, _NOWHERE)}
    command = ["bash", "--norc", "--noprofile", str(script)]
    session = Session(command, folder, {**environment, **added}, own / "log", limit_seconds, lambda: None, **options)
    outcome = session.run()
    log = (own / "log").read_bytes()
    return ShellRun(outcome, _printed(page, own, log), _failure(page, outcome, own, log.decode(errors="replace")), log)


def shell_script(page: Page, folder: Path) -> str:
    """The transcripts as one script; the content of the page's files goes into a folder."""
    lines = [""] * len(page.lines)
    for number, block in enumerate(page.shell):
        opening, closing = block.line - 2, block.end - 1
        if block.file:
            content = folder / f"file.{number}"
            content.write_text(block.source, encoding="utf-8")
            target = shlex.quote(block.file)
            lines[opening] = f'mkdir -p "$(dirname {target})"; cp {shlex.quote(str(content))} {target}'
        else:
            lines[opening], lines[closing] = f"__page_block {block.line}", "__page_block 0"
            lines[opening + 1 : closing] = block.source.split("\n")[:-1]
    here = f"__page={shlex.quote(str(folder))}"  # not exported: the commands see the environment of a reader
    lines[0] = "; ".join(filter(None, (here, *_PRELUDE, lines[0])))
    return "\n".join(lines) + "\n"


def _printed(page: Page, folder: Path, log: bytes) -> dict[int, str]:
    marks = [tuple(map(int, line.split())) for line in (folder / "marks").read_text(encoding="utf-8").splitlines()]
    by_line = printed_by_block([{"line": line, "size": size} for line, size in marks], log)
    return {block.line: by_line.get(block.line, "") for block in page.shell if not block.file}


def _failure(page: Page, outcome: CommandOutcome, folder: Path, log: str) -> Failure | None:
    note = folder / "failed"
    code, line = map(int, note.read_text(encoding="utf-8").split()) if note.is_file() else (0, 0)
    if code != outcome.returncode:  # an earlier one, of a command that was allowed to fail
        code, line = outcome.returncode, 0
    printed = [text for text in log.splitlines() if text.strip()]
    if outcome.timed_out:
        marks = (folder / "marks").read_text(encoding="utf-8").split()
        return Failure(int((marks or ["1"])[-2 if marks else 0]), f"no end after {outcome.seconds:.0f} s, killed")
    if outcome.returncode:
        places = [int(number) for number in _LINE.findall(log)]
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = f": {printed[-1].strip()}" if printed else ""
        return Failure(line or (places or [page.shell[0].line])[-1], f"this command {end}{last}")
    for left in outcome.leftovers:
        message = f"a process outlived the shell and was killed: {left.command} [pid {left.pid}]: end it or wait for it"
        return Failure(page.shell[0].line, message)
    return None
