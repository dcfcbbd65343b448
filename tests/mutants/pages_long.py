"""Plants mistakes in a copy of the project, and sees whether the pages that noticed each of them still do.

``python tests/mutants/pages.py [NAME...]``; a name is that of a mutant in ``pages.toml`` or the beginning of several.
``python tests/mutants/pages.py NAME --record PAGE...`` runs these pages with the mutant, and prints the rows of those
that fail. Python must have what pages need, as that of ``nox -s doctest`` has.
"""

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from run import ROOT, TABLES, Checkout, Mutant, Project, read_mutants

TABLE = TABLES / "pages.toml"
LIMIT_SECONDS = 1200
_TOO_LATE = "no end after"
_MOST_LINES = 10  # of a statement

RunPages = Callable[[Sequence[str]], Mapping[str, str]]
"""Runs pages, and returns the line that failed of each page that did."""
RunMutant = Callable[[str, Sequence[str]], Mapping[str, str]]
"""Runs pages with a mutant."""


@dataclass(frozen=True)
class Row:
    """A page that failed with a mutant.

    Attributes:
        mutant: The name of the mutant.
        page: The page as it was called when it failed.
        check: The line of the page that failed.
        now: The pages that it was split into, or its new name; the page itself by default.
    """

    mutant: str
    page: str
    check: str
    now: tuple[str, ...] = ()

    @property
    def pages(self) -> tuple[str, ...]:
        """The pages of which one must fail."""
        return self.now or (self.page,)


def read_rows(table: Path = TABLE) -> list[Row]:
    """Read the table of pages."""
    return [
        Row(mutant, page, row["check"], tuple(row.get("now", ())))
        for mutant, pages in tomllib.loads(table.read_text(encoding="utf-8")).items()
        for page, row in pages.items()
    ]


def run_pages(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Run the English pages of a checkout, and return the line that failed of each page that did."""
    build = root / "build" / "docs"
    shutil.rmtree(build, ignore_errors=True)
    options = ["--lang", "en", "--device", "cpu", "--jobs", "1", "--timeout", str(LIMIT_SECONDS)]
    done = subprocess.run(
        [sys.executable, "docs_test.py", *options, "--build", str(build / "pages"), *names],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    records = [json.loads(file.read_bytes()) for file in (build / "verified").rglob("*.json")]
    if missing := set(names) - {record["page"] for record in records}:
        raise SystemExit(f"no record of {', '.join(sorted(missing))}: {done.stdout}{done.stderr}")
    failed = {record["page"]: _failed_line(root, record) for record in records if record["status"] == "FAIL"}
    return {name: failed[name] for name in names if name in failed}


def _failed_line(root: Path, record: Mapping[str, Any]) -> str:
    error = record["error"]
    lines = (root / error["file"]).read_text(encoding="utf-8").splitlines()[error["line"] - 1 :]
    late = f" ({_TOO_LATE} {LIMIT_SECONDS} s)" if error["message"].startswith(_TOO_LATE) else ""
    return _first_statement([line.strip() for line in lines[:_MOST_LINES]]) + late


def _first_statement(lines: Sequence[str]) -> str:
    """Join the lines of a statement that begins in the first; only that one if none ends here."""
    for end in range(1, len(lines) + 1):
        with suppress(SyntaxError):
            ast.parse(text := " ".join(lines[:end]))
            return text
    return lines[0]


def check_rows(rows: Sequence[Row], run_plain: RunPages, run_mutant: RunMutant) -> int:
    """Tell of each row whether one of its pages fails with its mutant, and passes without; return the exit status."""
    broken: dict[str, str | None] = {}  # the line that failed without a mistake, of each page that ran
    found = 0
    for mutant in dict.fromkeys(row.mutant for row in rows):
        own = [row for row in rows if row.mutant == mutant]
        names = list(dict.fromkeys(name for row in own for name in row.pages))
        if new := [name for name in names if name not in broken]:
            broken |= dict.fromkeys(new) | dict(run_plain(new))
            _say(*(f"must pass without a mistake: {name}: {broken[name]}" for name in new if broken[name] is not None))
        tried = [name for name in names if broken[name] is None]
        failed = run_mutant(mutant, tried) if tried else {}
        for row in own:
            lines = [f"{name}: {failed[name]}" for name in row.pages if name in failed]
            found += bool(lines)
            said = lines or [f"{', '.join(row.pages)}: passes, and {row.page} failed at: {row.check}"]
            _say(f"{'fails' if lines else 'PASSES':<8}{mutant:<40}{said[0]}")
    mutants = {row.mutant for row in rows}
    _say(f"{len(mutants)} mutations: {found} of {len(rows)} recorded page failures still fail")
    return int(set(broken.values()) != {None} or found < len(rows))


def rows_of(mutant: str, failed: Mapping[str, str]) -> Iterator[str]:
    """Write the rows of pages that failed."""
    yield f'["{mutant}"]'
    yield from (f"{json.dumps(name)} = {{ check = {_quoted(line)} }}" for name, line in failed.items())


def _quoted(line: str) -> str:
    return json.dumps(line, ensure_ascii=False) if "'" in line else f"'{line}'"


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main(words: list[str]) -> int:
    """Run what was asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a mutant, or the beginning of several; all by default"
    )
    parser.add_argument("--record", nargs="+", metavar="PAGE", help="print the rows of those of these pages that fail")
    options = parser.parse_args(words)
    mutants = {mutant.name: mutant for mutant in read_mutants()}
    rows = [row for row in read_rows() if row.mutant.startswith(tuple(options.names) or "")]
    if options.record and not (len(options.names) == 1 and options.names[0] in mutants):
        parser.error("--record takes the name of one mutant")
    if not (rows or options.record):
        parser.error(f"no mutant of {TABLE.relative_to(ROOT)} begins with {', '.join(options.names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = Checkout(Project(), Path(folder))
        with_mutant = partial(_run_with, copy, mutants)
        if options.record:
            _say(*rows_of(options.names[0], with_mutant(options.names[0], options.record)))
            return 0
        return check_rows(rows, partial(run_pages, copy.root), with_mutant)


def _run_with(copy: Checkout, mutants: Mapping[str, Mutant], name: str, pages: Sequence[str]) -> dict[str, str]:
    with copy.planted(mutants[name]):
        return run_pages(copy.root, pages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
