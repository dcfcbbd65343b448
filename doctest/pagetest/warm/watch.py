"""The watch: runs pages again when they, or project files that they import, are saved."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagetest.finding import display_path
from pagetest.graph.fingerprint import references_of
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.script import make_script
from pagetest.model.tree import LANGUAGES
from pagetest.results.report import report_lines
from pagetest.results.result import Result
from pagetest.run.device import CUDA
from pagetest.run.runner import Runner
from pagetest.suite import Suite
from pagetest.warm.fork_server import ForkServerPool

POLL_SECONDS = 0.1
SETTLE_SECONDS = 0.03

FileStamp = tuple[int, int, int]


@dataclass
class PageWatcher:
    """Watches pages until it is interrupted."""

    suite: Suite  # the pages' tree, and the languages that are run
    names: Sequence[str]
    runner: Runner
    report: Callable[..., None]
    _servers: ForkServerPool = field(default_factory=ForkServerPool)

    def run(self) -> None:
        """Runs all pages, and then each one again whenever something that it depends on was saved."""
        self.runner = replace(self.runner, start=self._servers.start)
        try:
            stamps = self._settled_stamps()
            self._run_pages(self.names, time.monotonic())
            self.report(f"watching {len(self.names)} pages and {self._source}; Ctrl-C ends")
            while True:
                time.sleep(POLL_SECONDS)
                stamps = self._run_affected(stamps)
        finally:
            self._servers.close()

    def _run_affected(self, before: dict[Path, FileStamp]) -> dict[Path, FileStamp]:
        """Runs what was affected since the stamps were taken, and returns those that hold for these runs."""
        saved, stamps = time.monotonic(), self._stamps()
        if stamps == before:
            return before
        stamps = self._settled_stamps()
        changed = {path for path in stamps.keys() | before.keys() if stamps.get(path) != before.get(path)}
        try:
            names = [name for name in self.names if self._is_affected(name, changed)]
        except FileNotFoundError:  # a file went while it was read: look again
            return before
        self._run_pages(names, saved, sorted(changed))
        return stamps

    @property
    def _source(self) -> Path:
        return self.runner.root / "src"

    def _run_pages(self, names: Sequence[str], saved: float, changed: Sequence[Path] = ()) -> None:
        for name in names:
            self.report(
                f"{time.strftime('%H:%M:%S')}  {name}"
                + "".join(f"  {display_path(path)} was saved" for path in changed)
            )
            imports = {self.runner.script_file(page): self._imports(page) for page in self._pages(name)}
            for file, found in imports.items():
                self._servers.drop_unfit(file, found)
            for result in self.suite.run([name], self.runner):
                first, *others = report_lines(result, len(name))
                self.report(f"{first}{self._start_and_time(result, saved)}", *others)
                file = self.runner.build / result.language / name / f"{Path(name).name}.py"
                if result.log and result.device != CUDA:  # no page was run on a GPU by a fork yet
                    self._servers.start_server(file, imports.get(file, frozenset()))

    def _start_and_time(self, result: Result, saved: float) -> str:
        if not result.log:
            return ""
        return f"  [{'warm' if self._servers.was_forked else 'cold'}, {time.monotonic() - saved:.1f} s]"

    def _pages(self, name: str) -> list[Page]:
        tree = self.suite.tree
        return [tree.page(name, language) for language in tree.languages(name) if language in self.suite.languages]

    def _imports(self, page: Page) -> frozenset[str]:
        """What the page, and the project files that it reaches, import of other packages."""
        return ImportGraph(self._source).external_imports(references_of(make_script(page)))

    def _is_affected(self, name: str, changed: set[Path]) -> bool:
        """Whether a page is written in one of the files, or reaches one."""
        if any(self.suite.tree.path(name, language) in changed for language in LANGUAGES):
            return True
        graph = ImportGraph(self._source, frozenset(path for path in changed if not path.is_file()))
        return any(graph.reached(references_of(make_script(page))) & changed for page in self._pages(name))

    def _stamps(self) -> dict[Path, FileStamp]:
        """What distinguishes one state of each watched file from the next."""
        texts = [self.suite.tree.path(name, language) for name in self.names for language in LANGUAGES]
        return {path: stamp for path in [*texts, *self._source.rglob("*.py")] if (stamp := _stamp(path))}

    def _settled_stamps(self) -> dict[Path, FileStamp]:
        """The stamps, once nothing changes any more: an editor may write a file in several steps."""
        before, now = None, self._stamps()
        while before != now:
            time.sleep(SETTLE_SECONDS)
            before, now = now, self._stamps()
        return now


def _stamp(path: Path) -> FileStamp | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino
