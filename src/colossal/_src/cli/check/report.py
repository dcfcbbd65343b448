"""What a check says: rows in sections, and whether the machine is usable."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

JSON_VERSION = 1
"""Raised when a key of the JSON output changes its meaning or goes; new keys and rows may come at any time."""

Status = Literal["ok", "note", "problem", "skipped"]
"""Fine; usable, but there is something to know; not usable; not looked at because of a problem elsewhere."""


@final
@dataclass(frozen=True)
class Row:
    """One thing that was looked at."""

    section: str  # the group that it belongs to
    name: str  # what was looked at; unique in its section
    status: Status  # how it is
    found: str  # what was found, for people
    value: Any = None  # the same for programs: a number, a text, a truth value, a list of texts or None
    advice: str | None = None  # what to do about it; None if it is fine


@final
@dataclass(frozen=True)
class Section:
    """A part of the check: a title, and the function that looks."""

    title: str
    look: Callable[[], Iterable[Row]]

    def rows(self) -> Iterator[Row]:
        """Look; what goes wrong while looking is a problem, not the end of the check."""
        try:
            yield from self.look()
        except Exception as error:  # noqa: BLE001 (a broken library may raise anything)
            found = f"{type(error).__name__}: {_first_line(error)}"
            yield Row(
                self.title, "looking", "problem", found, advice="Install the packages anew; report it if it stays."
            )


@final
@dataclass(frozen=True)
class Report:
    """All rows of a check."""

    rows: tuple[Row, ...]

    @property
    def problems(self) -> tuple[Row, ...]:
        """The rows because of which the machine is not usable."""
        return tuple(row for row in self.rows if row.status == "problem")

    @property
    def usable(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"version": JSON_VERSION, "usable": self.usable, "rows": [asdict(row) for row in self.rows]}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
