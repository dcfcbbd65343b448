"""The test files nearest to a change, as many as take some given time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pagetest.graph.imports import ImportGraph, read_references

_UNKNOWN_SECONDS = 5.0
"""Of a test file that has no stored duration."""


@dataclass(frozen=True)
class NearestTests:
    """Which test files a change can reach, and how near each of them is.

    Attributes:
        root: The project's root.
        changed: The files that changed.
        seconds: How long each test file takes, by its path from the root.
    """

    root: Path
    changed: frozenset[Path]
    seconds: Mapping[str, float]

    def within(self, budget_seconds: float) -> tuple[list[str], list[str]]:
        """Split the reached test files: those to run, and those left out; each with the nearest first.

        A test file that changed itself runs in any case.
        """
        run, left_out = [], []
        distances = {name: distance for name, path in self._files if (distance := self._distance(path)) is not None}
        for name in sorted(distances, key=lambda name: (distances[name], self.seconds_of(name), name)):
            if distances[name] < 0 or self.seconds_of(name) <= budget_seconds:
                budget_seconds -= self.seconds_of(name)
                run.append(name)
            else:
                left_out.append(name)
        return run, left_out

    def seconds_of(self, name: str) -> float:
        """How long a test file takes."""
        return self.seconds.get(name, _UNKNOWN_SECONDS)

    @property
    def _files(self) -> Iterator[tuple[str, Path]]:
        for path in sorted((self.root / "tests").rglob("test_*.py")):
            yield path.relative_to(self.root).as_posix(), path

    @cached_property
    def _graphs(self) -> list[ImportGraph]:
        gone = frozenset(path for path in self.changed if not path.is_file())
        return [ImportGraph(self.root / folder, gone) for folder in ("src", "doctest", "tests/helpers")]

    @cached_property
    def _folders(self) -> list[Path]:
        """The folders, or files, of the tests of the modules and packages in which something changed."""
        sources = (self.root / "src/colossal/_src", self.root / "src/colossal", self.root / "doctest")
        parts = [
            next(path.relative_to(source).parts[0] for source in sources if source in path.parents)
            for path in self.changed
            if any(source in path.parents for source in sources)
        ]
        return [self.root / "tests" / part.removesuffix(".py") for part in parts]

    def _distance(self, path: Path) -> int | None:
        """-1 for a changed test; 0 for one of a changed package; else 1 + files between it and the change; or None."""
        if path in self.changed or self._conftests(path) & self.changed:
            return -1
        if any(map(path.is_relative_to, self._folders)):
            return 0
        code = read_references(path, "")
        helpers = [file for file in self._graphs[-1].distances(code) if file.is_file()]
        steps = [
            step + (part != path)
            for part in (path, *helpers)
            for graph in self._graphs
            for file, step in graph.distances(read_references(part, "")).items()
            if file in self.changed
        ]
        return 1 + min(steps) if steps else None

    def _conftests(self, path: Path) -> set[Path]:
        """The conftest.py files of a test, but that of all tests: a change there would select everything."""
        folders = [folder for folder in path.parents if folder.is_relative_to(self.root / "tests")][:-1]
        return {folder / "conftest.py" for folder in folders}
