"""Pages that fail run once more, alone; what is told at the end; and the limits of pages."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagetest import cli
from pagetest.finding import Finding
from pagetest.limits import VARIABLE
from pagetest.results.result import FAIL, PASS, Result
from pagetest.run.failure import Failure

ONCE = """
from pathlib import Path

diary = Path({!r})
before = diary.read_text() if diary.exists() else ""
diary.write_text(before + "{} ")
assert {}, "the first line\\nand another one"
"""


class Runs:
    """Stands for the runs of pages: which were asked for, with which languages, limit and jobs."""

    def __init__(self, *fates: str) -> None:
        self.fates, self.asked = fates, list[tuple[list[str], Sequence[str], float, int]]()

    def __call__(self, suite: Any, names: Sequence[str], runner: Any, jobs: int) -> Iterator[Result]:
        self.asked.append((list(names), suite.languages, runner.limit_seconds, jobs))
        for name in names:
            for language in suite.languages:
                yield self.result(suite.tree.path(name, language), name, language)

    def result(self, path: Path, name: str, language: str) -> Result:
        """A page fails in those runs in which a fate says so; one that is refused does not run."""
        count = sum(name in names for names, *_ in self.asked)
        if f"{name} refused" in self.fates:
            return Result(name, language, path, FAIL, findings=(Finding(path, 3, "write it so\nand so"),))
        fails = {f"{name} {count}", f"{name} {language} {count}"} & {*self.fates}
        failure = Failure(5, f"error of run {count}") if fails else None
        return Result(name, language, path, FAIL if fails else PASS, device="cpu", failure=failure, log=path)


@pytest.fixture
def run(docs, monkeypatch, capsys) -> Any:
    """Runs `--all` of pages with the given fates; returns the status, what was asked for and what was printed."""

    def run(names: Sequence[str], fates: Sequence[str], *words: str) -> tuple[int, list[Any], list[str]]:
        for name in names:
            docs.add(name, "x = 1")
        runs = Runs(*fates)
        monkeypatch.setattr(cli, "_run_pages", runs)
        status = docs.main("--all", *words)
        printed = capsys.readouterr().out.replace(f"{docs.source}/", "").splitlines()
        return (
            status,
            runs.asked,
            printed[next(index for index, line in enumerate(printed) if "hungriest" in line) + 1 :],
        )

    return run


BOTH = ("en", "zh-Hans")


def test_what_failed_runs_once_more_alone_and_with_twice_the_limit(docs, run) -> None:
    fates = ["bad 1", "bad 2", "flaky 1", "half zh-Hans 1", "wrong refused"]
    names = ["bad", "flaky", "good", "half", "wrong"]
    status, asked, closing = run(names, fates, "--retry", "--timeout", "7")
    assert asked == [
        (names, BOTH, 7.0, cli.NUM_JOBS),
        (["bad"], BOTH, 14.0, 1),
        (["flaky"], BOTH, 14.0, 1),
        (["half"], ("zh-Hans",), 14.0, 1),
    ]
    assert status == 1
    assert closing == [
        "FAIL  docs_test.py bad --lang en  # en/bad.md:5: error of run 2",
        "FAIL  docs_test.py bad --lang zh-Hans  # zh-Hans/bad.md:5: error of run 2",
        "FAIL  docs_test.py wrong --lang en  # en/wrong.md:3: write it so",
        "FAIL  docs_test.py wrong --lang zh-Hans  # zh-Hans/wrong.md:3: write it so",
        "FLAKY docs_test.py flaky --lang en  # en/flaky.md:5: error of run 1",
        "FLAKY docs_test.py flaky --lang zh-Hans  # zh-Hans/flaky.md:5: error of run 1",
        "FLAKY docs_test.py half --lang zh-Hans  # zh-Hans/half.md:5: error of run 1",
        "6 passed, 4 failed",
    ]
    recorded = {(record["page"], record["status"]) for record in docs.records.read()}
    assert recorded == {("bad", FAIL), ("flaky", PASS), ("good", PASS), ("half", PASS), ("wrong", FAIL)}


def test_a_flaky_page_does_not_fail_the_run(run) -> None:
    status, asked, closing = run(["flaky", "good"], ["flaky 1"], "--retry", "--lang", "en")
    assert (status, len(asked)) == (0, 2)
    assert closing == ["FLAKY docs_test.py flaky --lang en  # en/flaky.md:5: error of run 1", "2 passed, 0 failed"]
    status, asked, closing = run(["flaky", "good"], ["flaky 1"], "--lang", "en", "--device", "cpu")
    assert (status, len(asked)) == (1, 1)
    assert closing == [
        "FAIL  docs_test.py flaky --lang en --device cpu  # en/flaky.md:5: error of run 1",
        "1 passed, 1 failed",
    ]


@pytest.mark.parametrize(("count", "again"), [(cli.MAX_RETRIED, cli.MAX_RETRIED), (cli.MAX_RETRIED + 1, 0)])
def test_many_failures_are_no_accident(run, count, again) -> None:
    names = [f"page_{number:02}" for number in range(count)]
    status, asked, closing = run(names, [f"{name} 1" for name in names], "--retry", "--lang", "en")
    assert (status, len(asked) - 1) == (0 if again else 1, again)
    assert closing[-1] == (f"{count} passed, 0 failed" if again else f"0 passed, {count} failed")


def test_one_variable_scales_the_limit_of_pages(run, monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert run(["good"], [])[1][0][2] == 600.0
    monkeypatch.setenv(VARIABLE, "2.5")
    assert run(["good"], [])[1][0][2] == 1500.0
    assert [limit for _, _, limit, _ in run(["bad"], ["bad 1"], "--retry", "--timeout", "8")[1]] == [20.0, 40.0]


@pytest.mark.slow
def test_a_page_that_passes_at_its_second_run_is_flaky(docs) -> None:
    diary = docs.source.parent / "diary"
    for name, claim in {"bad": "False", "flaky": "'flaky' in before", "good": "before"}.items():
        docs.add(name, ONCE.format(str(diary), name, claim))
    done = docs.run("--all", "--retry", "--jobs", "1")
    assert diary.read_text().split() == ["bad", "flaky", "good", "bad", "flaky"]
    assert done.returncode == 1
    *_, bad, same, flaky, shared, counts = done.stdout.replace(f"{docs.source}/", "").splitlines()
    reason = "AssertionError: the first line ... and another one"
    assert bad == f"FAIL  docs_test.py bad --lang en  # en/bad.md:10: {reason}"
    assert same == "FAIL  docs_test.py bad --lang zh-Hans  # code identical to en, which failed"
    assert flaky == f"FLAKY docs_test.py flaky --lang en  # en/flaky.md:10: {reason}"
    assert shared == "FLAKY docs_test.py flaky --lang zh-Hans  # code identical to en, which failed"
    assert counts == "4 passed, 2 failed"
    assert [record["status"] for record in docs.records.read()] == ["FAIL", "PASS", "PASS", "FAIL", "SAME", "SAME"]
