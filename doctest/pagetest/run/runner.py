"""Runs one page: its folder, its transcripts, its script and command, its result."""

import fcntl
import marshal
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagetest.model.instrument import executed_lines, instrument_script, statement_lines
from pagetest.model.page import Page
from pagetest.model.script import Script
from pagetest.outputs.blocks import outputs_of, stale_outputs
from pagetest.outputs.library_texts import has_other_texts, why_not_compared
from pagetest.results.result import FAIL, PASS, Figure, Result, result_without_run
from pagetest.run.command import StartCommand, start_command
from pagetest.run.device import CPU, Device
from pagetest.run.environment import clean_environment, page_environment
from pagetest.run.events import RunEvents
from pagetest.run.failure import Failure, find_failure
from pagetest.run.live import LiveView
from pagetest.run.probe.page_output import FIGURES, CapturedOutput
from pagetest.run.python_warnings import python_warnings
from pagetest.slots import slots_needed

if TYPE_CHECKING:
    from pagetest.run.shell import ShellRun

PROTECTED_FOLDERS = (".git", "benchmarks", "csrc", "docs", "doctest", "examples", "src", "tests")
"""The folders of the project that no page may change."""

LOG = "log.txt"
"""The file in the folder of a page that holds what it printed on all ranks."""


@dataclass(frozen=True)
class Runner:
    """How pages are run."""

    root: Path
    build: Path  # the folder that holds one folder per page
    limit_seconds: float
    echo: bool = False  # whether the log is shown as it comes
    live: bool = False  # whether headings, the page's own output and its figures are shown as they come
    device: Device = field(default_factory=Device)
    start: StartCommand = start_command
    # Held while a page runs on a number of ranks.
    acquire_slots: Callable[[int], AbstractContextManager[object]] = nullcontext

    def script_file(self, page: Page) -> Path:
        """The script of a page, alone in a folder of its own."""
        return self.build / page.language / page.name / f"{page.stem}.py"

    def run(self, page: Page, script: Script) -> Result:
        """Runs a page that the static rules allow."""
        file = self.script_file(page)
        with (
            self.acquire_slots(slots_needed(page)),
            _locked_empty_folder(file.parent),
            tempfile.TemporaryDirectory(prefix="page-") as reports,
        ):
            shell = self._run_shell(page, file.parent, Path(reports)) if script.shell else None
            if shell and (shell.failure or not script.has_program):
                return self._shell_result(page, script, shell, file.parent / LOG)
            file.write_text(script.text, encoding="utf-8", newline="\n")
            return self._run_command(page, script, file, Path(reports), shell)

    def _run_shell(self, page: Page, folder: Path, reports: Path) -> "ShellRun":
        from pagetest.run.shell import run_shell

        environment = self.device.add_to_environment(clean_environment(os.environ, self.root))
        return run_shell(page, folder, environment, reports, self.limit_seconds, echo=self.echo)

    def _shell_result(self, page: Page, script: Script, shell: "ShellRun", log: Path) -> Result:
        """The result of a page without a program, or of one whose transcript failed before it."""
        log.write_bytes(shell.log)
        result = result_without_run(page, script, FAIL if shell.failure else PASS)
        device = self.device.requested or CPU
        return self._add_shell(replace(result, device=device, failure=shell.failure, log=log), page, shell)

    def _add_shell(self, result: Result, page: Page, shell: "ShellRun") -> Result:
        """Adds what the transcripts cost and printed; all of their commands ran, or one failed the page."""
        by_line = {**shell.printed, **result.printed}
        printed = {block.line: by_line.get(block.line, "") for block in page.executed}
        stale = () if result.failure else tuple(stale_outputs(page, printed, result.device))
        count = sum(bool(line.strip()) for block in page.shell if not block.file for line in block.source.split("\n"))
        expected, faults = len(outputs_of(page)), () if has_other_texts(page) else stale
        return replace(
            result,
            status=FAIL if result.failure or faults else PASS,
            seconds=round(result.seconds + shell.outcome.seconds, 2),
            peak_bytes=max(result.peak_bytes, shell.outcome.peak_bytes),
            lines_run=result.lines_run + (0 if shell.failure else count),
            lines_total=result.lines_total + count,
            outputs_matched=0 if result.failure else expected - len(stale),
            outputs_total=expected,
            outputs_note=why_not_compared(page, len(stale)),
            findings=faults,
            printed=printed,
        )

    def _sampler(self, page: Page, printed: CapturedOutput, events: RunEvents) -> Callable[[], None]:
        """What is done again and again while the page runs."""
        if not self.live:
            return printed.copy_new
        view = LiveView(page, events, self.script_file(page).parent)

        def follow() -> None:
            printed.copy_new()
            view.show_new()

        return follow

    def _run_command(self, page: Page, script: Script, file: Path, reports: Path, shell: "ShellRun | None") -> Result:
        from pagetest.run.session import Session

        expected, printed = outputs_of(page), CapturedOutput(reports)
        marked = instrument_script(script, str(file), [block.line for block in page.runnable])
        protected = [f"{folder}/" for folder in (page.tree, *(self.root / name for name in PROTECTED_FOLDERS))]
        compiled = {"code": marked.code, "marks": marked.names, "last": marked.last, "protected": protected}
        (reports / f"code.{sys.implementation.cache_tag}").write_bytes(marshal.dumps(compiled))
        events = RunEvents(reports, file)
        environment = self.device.add_to_environment(page_environment(os.environ, self.root, file, reports))
        log = file.parent / LOG
        printed.request(log)
        session = Session(
            shlex.split(page.command),
            file.parent,
            environment,
            log,
            self.limit_seconds - (shell.outcome.seconds if shell else 0),
            events.request_stacks,
            self.echo,
            self._sampler(page, printed, events),
            self.start,
        )
        try:
            outcome = session.run()
        except OSError as error:
            failure = Failure(page.command_line, f"the command cannot be started: {error.strerror}: install it")
            return replace(result_without_run(page, script, FAIL), failure=failure)
        if shell:
            log.write_bytes(shell.log + log.read_bytes())
        by_block = {block.line: events.printed.get(block.line, "") for block in page.runnable}
        failure = find_failure(page, marked.marks, outcome, events, self.device)
        stale = () if failure or shell else tuple(stale_outputs(page, by_block, events.device.partition(" ")[0]))
        faults = () if has_other_texts(page) else stale
        result = Result(
            page.name,
            page.language,
            page.path,
            FAIL if failure or faults else PASS,
            command=page.command,
            device=events.device,
            backend=events.backend,
            world=events.world_size,
            seconds=round(outcome.seconds, 2),
            peak_bytes=outcome.peak_bytes,
            lines_run=len(executed_lines(marked.marks, events.reached(0))),
            lines_total=len(statement_lines(marked.marks)),
            outputs_matched=0 if failure else len(expected) - len(stale),
            outputs_total=len(expected),
            outputs_note=why_not_compared(page, len(stale)),
            code_hash=script.code_hash,
            findings=faults,
            failure=failure,
            log=log,
            warnings=tuple(python_warnings(log.read_text(encoding="utf-8", errors="replace"), page)),
            figures=tuple(_figures(page, file.parent, events.figure_lines)),
            printed=by_block,
        )
        return self._add_shell(result, page, shell) if shell else result


def _figures(page: Page, folder: Path, drawn: Mapping[str, int]) -> Iterator[Figure]:
    """The figures in the page's folder; those that no block is known to have drawn come last."""
    for file in sorted(folder.iterdir()):
        if file.suffix in FIGURES and file.is_file():
            yield Figure(file.name, drawn.get(file.name, 0) or page.runnable[-1].line, file.read_bytes())


@contextmanager
def _locked_empty_folder(folder: Path) -> Iterator[None]:
    """Holds the page's folder, emptied; a second run of the page waits for the first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        yield
