"""The selection: which pages are not run again, because the committed record of their run holds."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pagetest.finding import Finding
from pagetest.outputs.matching import normalize_lines
from pagetest.results.result import FAIL, PASS, Result
from pagetest.results.run_finder import RecordedRun, RunFinder
from pagetest.results.sample import sample

VARIABLE, CHANGED = "COLOSSAL_CHECK", "changed"
SAMPLE_SIZE = 6


def is_wanted() -> bool:
    """Whether the environment asks to leave out what has not changed; without it everything runs."""
    return os.environ.get(VARIABLE) == CHANGED


@dataclass(frozen=True)
class Selection:
    """Which pages run."""

    # The recorded runs that hold, by page and language; of pages all of whose languages have one.
    runs: Mapping[str, Mapping[str, RecordedRun]]
    sample: frozenset[str]  # the pages among them that run all the same, and must reproduce their record

    def names_to_run(self, names: Sequence[str]) -> list[str]:
        """The pages that run."""
        return [name for name in names if name not in self.runs or name in self.sample]

    def compare_with_record(self, result: Result) -> Result:
        """The result of a page; it fails where the page passed and did something else than its record says."""
        run = self.runs.get(result.name, {}).get(result.language)
        findings = tuple(_deviations(result, run)) if run and result.status == PASS else ()
        return replace(result, status=FAIL, findings=findings) if findings else result


def select_pages(names: Sequence[str], languages: Sequence[str], fitting: RunFinder, commit: str) -> Selection:
    """Looks up the record of every page."""
    found = {name: _valid_runs(name, languages, fitting) for name in names}
    runs = {name: by_language for name, by_language in found.items() if len(by_language) == len(languages)}
    return Selection(runs, sample(runs, commit, SAMPLE_SIZE))


def _valid_runs(name: str, languages: Sequence[str], fitting: RunFinder) -> dict[str, RecordedRun]:
    """The runs of a page's languages that hold; none where the page has nothing to run."""
    there = [language for language in languages if language in fitting.tree.languages(name)]
    pages = [fitting.tree.page(name, language) for language in there]
    return {page.language: run for page in pages if page.executed and (run := fitting.find(page))}


def _deviations(result: Result, run: RecordedRun) -> Iterator[Finding]:
    """Where a run that passed differs from the recorded one in more than what the page's comparison allows."""
    remedy = "find out why, or record it anew with --record"
    for (line, printed), before, figures in zip(result.printed.items(), run.printed, run.figures, strict=True):
        if bool(normalize_lines(printed)) != bool(normalize_lines(before)):
            one, other = _first_line(printed), _first_line(before)
            message = f"this block printed {one}, and {other} when it was recorded on {run.record['date']}: {remedy}"
            yield Finding(result.path, line, message)
        drawn = sorted(figure.name for figure in result.figures if figure.line == line)
        known = sorted(file.name for file in figures)
        if drawn != known:
            names = [" and ".join(names) or "nothing" for names in (drawn, known)]
            message = f"this block drew {names[0]}, and {names[1]} when it was recorded: {remedy}"
            yield Finding(result.path, line, message)


def _first_line(text: str) -> str:
    return next((f"`{line}`" for _, line in normalize_lines(text)), "nothing")
