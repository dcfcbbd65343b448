"""A finding: one thing that is wrong with a page; and the error of a wrong call."""

import os
from dataclasses import dataclass
from pathlib import Path


def display_path(path: Path) -> str:
    """The path as a reader would type it: relative if it is below the working directory."""
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def with_count(number: int, noun: str) -> str:
    """The number with its noun, in the singular where there is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, order=True)
class Finding:
    """What is wrong, where, and what to do about it."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{display_path(self.path)}:{self.line}: {self.message}"


class UsageError(Exception):
    """What was asked for does not exist here, or is asked in the wrong way."""
