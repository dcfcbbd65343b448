"""The pytest plugin: `pytest docs/source -n 2` runs every page of the tree as one test."""

import fcntl
import pickle
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagetest.checks.parity import compare_structure
from pagetest.limits import PAGE_SECONDS, scaled
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.results.recorder import Recorder, run_facts
from pagetest.results.records import FOLDER_NAME, BrokenRecordError, Records
from pagetest.results.report import facts_of, report_lines
from pagetest.results.result import NONE, SAME, Result
from pagetest.run.device import DEVICES, Device
from pagetest.run.exempt import why_exempt
from pagetest.run.runner import Runner
from pagetest.slots import Slots, default_num_slots
from pagetest.suite import Suite

SOURCE, BUILD = "docs/source", "build/docs/pages"


@dataclass(frozen=True)
class PageRun:
    """The pages of this run of pytest, over all its workers."""

    suite: Suite
    runner: Runner
    shared_folder: Path  # the folder where the workers leave results for each other
    last_seconds: Mapping[str, float]  # how long pages took when they were run last
    recorder: Recorder

    def run(self, name: str, language: str) -> Result:
        """Runs a page, or reuses the run of its original if the code is the same, and records the result."""
        result = self._run_or_reuse(name, language)
        self.recorder.add(result)
        return result

    def reuses_original_run(self, name: str, language: str) -> bool:
        """Whether the run of its original counts for the page."""
        first = self.suite.tree.languages(name)[:1]
        if not first or first[0] == language or not self.suite.tree.path(name, language).is_file():
            return False
        return compare_structure(self.suite.tree.page(name, first[0]), self.suite.tree.page(name, language)).same_code

    def expected_seconds(self, name: str, language: str) -> float:
        """The seconds that a page should take; a page that never ran may take any time."""
        return (
            0.0
            if self.reuses_original_run(name, language)
            else self.last_seconds.get(f"{language}/{name}", PAGE_SECONDS)
        )

    def _run_or_reuse(self, name: str, language: str) -> Result:
        tree = self.suite.tree
        if language not in tree.languages(name):
            return self.suite.missing_page_result(name, language)
        page, first = tree.page(name, language), tree.languages(name)[0]
        if first == language:
            return self._run_original_once(name, language)
        credit = self._run_original_once(name, first) if self.reuses_original_run(name, language) else None
        return self.suite.run_page(page, self.runner, tree.page(name, first), credit)

    def _run_original_once(self, name: str, language: str) -> Result:
        """The result of an original, which the first worker who needs it runs."""
        file = self.shared_folder / f"{language}-{name.replace('/', '%')}"
        with _locked(file.with_suffix(".lock")):
            if file.exists():
                return pickle.loads(file.read_bytes())  # noqa: S301 (from a worker of this run)
            result = self.suite.run_page(self.suite.tree.page(name, language), self.runner)
            file.write_bytes(pickle.dumps(result))
            return result


PAGE_RUN = pytest.StashKey[PageRun]()


class PageError(Exception):
    """A page that failed."""

    def __init__(self, result: Result) -> None:
        super().__init__(*report_lines(result, len(result.name)))


class PageFile(pytest.File):
    """One Markdown file."""

    def collect(self) -> Iterator["PageItem"]:
        """The page, and each translation that it should have and has not."""
        page_run = self.config.stash[PAGE_RUN]
        tree = page_run.suite.tree
        language, _, name = self.path.relative_to(tree.source).with_suffix("").as_posix().partition("/")
        yield PageItem.from_parent(self, name=Path(name).name, page=name, language=language)
        if tree.languages(name)[0] == language:
            for absent in set(LANGUAGES) - set(tree.languages(name)):
                yield PageItem.from_parent(self, name=f"{Path(name).name}[{absent}]", page=name, language=absent)


class PageItem(pytest.Item):
    """One page in one language."""

    def __init__(self, page: str, language: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.page = page
        self.language = language

    @property
    def page_run(self) -> PageRun:
        """The pages of this run."""
        return self.config.stash[PAGE_RUN]

    def runtest(self) -> None:
        """Runs the page."""
        tree = self.page_run.suite.tree
        original = tree.page(self.page, tree.languages(self.page)[0])
        if reason := why_exempt(original, self.page_run.recorder.device):
            pytest.skip(reason)
        result = self.page_run.run(self.page, self.language)
        self.user_properties.append(("page", [result.status, facts_of(result)]))
        if result.status == NONE:
            pytest.skip(result.note)
        if result.is_failed:
            raise PageError(result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report of the page, in the place of a traceback through the harness."""
        if isinstance(excinfo.value, PageError):
            return "\n".join(map(str, excinfo.value.args))
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the page is."""
        return self.path, 0, f"{self.language}/{self.page}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of pages."""
    group = parser.getgroup("pages", "tutorials")
    group.addoption("--pages-device", choices=DEVICES, default="", help="the device of all pages")
    group.addoption("--pages-timeout", type=float, default=PAGE_SECONDS, metavar="SECONDS", help="limit per page")
    group.addoption("--pages-slots", type=int, default=0, metavar="N", help="ranks that may run at a time")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the page run; the workers of xdist get the folder for their common results from the controller."""
    given = getattr(config, "workerinput", {})
    device = Device(str(config.getoption("pages_device", "")))
    if device.fault and not given:
        raise pytest.UsageError(device.fault.replace("--device", "--pages-device"))
    root = config.rootpath
    records = Records((root / BUILD).with_name(FOLDER_NAME))
    slots = Slots(root / BUILD / ".slots", config.getoption("pages_slots", 0) or default_num_slots())
    limit = scaled(float(config.getoption("pages_timeout", PAGE_SECONDS) or PAGE_SECONDS))
    config.stash[PAGE_RUN] = PageRun(
        Suite(Tree(root / SOURCE), LANGUAGES, root / "src"),
        Runner(root, root / BUILD, limit, device=device, acquire_slots=slots.acquire),
        Path(given.get("pages_shared") or tempfile.mkdtemp(prefix="pages-")),
        given.get("pages_seconds") or _last_seconds(records),
        Recorder(records, device, root, run_facts(root, device.requested)),
    )
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 1  # xdist would else give the long pages, which come first, all to one worker


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Passes a worker of xdist what all workers must agree on."""
    page_run = node.config.stash[PAGE_RUN]
    node.workerinput.update(pages_shared=str(page_run.shared_folder), pages_seconds=dict(page_run.last_seconds))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes what the workers shared."""
    if not hasattr(config, "workerinput") and PAGE_RUN in config.stash:
        shutil.rmtree(config.stash[PAGE_RUN].shared_folder, ignore_errors=True)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> PageFile | None:
    """Collects the pages of the tree."""
    tree = parent.config.stash[PAGE_RUN].suite.tree
    if file_path.suffix != ".md" or not file_path.is_relative_to(tree.source):
        return None
    language, _, name = file_path.relative_to(tree.source).with_suffix("").as_posix().partition("/")
    return PageFile.from_parent(parent, path=file_path) if language in LANGUAGES and name in tree.names else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long pages first, and those last that reuse the run of their original."""
    costs: dict[pytest.Item, float] = {
        item: item.page_run.expected_seconds(item.page, item.language) for item in items if isinstance(item, PageItem)
    }
    items.sort(key=lambda item: -costs.get(item, 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets a page that is not run be skipped at its own place."""
    report = yield
    if isinstance(item, PageItem) and report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = (str(item.path), 1, report.longrepr[2])
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Counts the pages that reuse a run separately, and shows the facts of the others."""
    status, facts = dict(getattr(report, "user_properties", ())).get("page", ("", ""))
    if not status or report.when != "call" or not report.passed:
        return None
    return ("same", "=", f"SAME {facts}") if status == SAME else ("passed", ".", f"PASSED {facts}")


def _last_seconds(records: Records) -> dict[str, float]:
    try:
        found = records.read()
    except BrokenRecordError:
        return {}
    return {f"{record['lang']}/{record['page']}": float(record.get("seconds") or 0.0) for record in found}


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
