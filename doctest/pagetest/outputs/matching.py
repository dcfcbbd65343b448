"""Matching: whether printed text is what a page shows, and where it differs first."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from math import inf, isinf

WILDCARD = "..."
TOLERANCE, ANY_NUMBER = 1e-3, inf

# [Note: what counts as the same output]
# Lines are compared one by one. White space inside a line is normalized; that around it and blank lines are dropped.
# `...` stands for any text inside its line, and alone on a line for any number of lines.
# A number with a decimal point or an exponent may be off by one thousandth of the expected one: it is a result of
# arithmetic. Two integers must be equal: an integer counts, or names a rank, a port, a year. All else
# is text and must be equal too: nan and inf, a version (2.13.0), an address (127.0.0.1), a number in a word (fp16).
# Where a block is marked `exact`, numbers are text. On a GPU a number that is a result of arithmetic may be any other:
# random numbers are those of the device, and so is the order of sums. What must hold there, the page asserts.

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_POINT = r"\.(?:\d+|(?=[,\])eE]|\s+-?\d|\s+\]))"
NUMBER = re.compile(rf"(?<![\w.])[-+]?(?:{_DIGITS}(?:{_POINT})?|\.\d+)(?:[eE][-+]?\d+)?(?!\.?\d|\.\w)")

_Matcher = Callable[[str, int], Iterable[int]]


@dataclass(frozen=True)
class Difference:
    """The first line that differs."""

    index: int  # the line of the expected text, counted from 0; the number of its lines where more was printed
    expected: str  # that line, normalized; empty where nothing more was expected
    printed: str  # the line that was printed instead; empty where nothing more was printed


def normalize_lines(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with normalized white space and their indices."""
    normalized = ((index, " ".join(line.split())) for index, line in enumerate(re.split(r"\r\n|\n|\r", text)))
    return [(index, line) for index, line in normalized if line]


def first_difference(
    expected: str, printed: str, exact: bool = False, tolerance: float = TOLERANCE
) -> Difference | None:
    """Compares texts; see [Note: what counts as the same output]."""
    lines = [line for _, line in normalize_lines(printed)]
    places = {0}
    for index, line in normalize_lines(expected):
        if line == WILDCARD:
            after = set(range(min(places), len(lines) + 1))
        else:
            after = {
                place + 1
                for place in places
                if place < len(lines) and line_matches(line, lines[place], exact, tolerance)
            }
        if not after:
            return Difference(
                index, line, _closest_line(line, [lines[place] for place in places if place < len(lines)])
            )
        places = after
    if len(lines) in places:
        return None
    return Difference(expected.count("\n"), "", lines[max(places)])


def line_matches(expected: str, printed: str, exact: bool = False, tolerance: float = TOLERANCE) -> bool:
    """Whether a normalized line matches an expected one."""
    places = {0}
    for ends in _matchers(expected, exact, tolerance):
        places = {end for place in places for end in ends(printed, place)}
    return len(printed) in places


def _closest_line(line: str, candidates: list[str]) -> str:
    return max(candidates, key=lambda candidate: SequenceMatcher(None, line, candidate).ratio(), default="")


def _matchers(expected: str, exact: bool, tolerance: float) -> Iterator[_Matcher]:
    """The parts of a line, as functions: where a part can end in a printed line if it begins at a given place."""
    for index, segment in enumerate(expected.split(WILDCARD)):
        if index:
            yield _match_anything
        done = 0
        for number in () if exact else NUMBER.finditer(segment):
            yield from _literals(segment[done : number.start()])
            yield partial(_match_number, number.group(), tolerance)
            done = number.end()
        yield from _literals(segment[done:])


def _literals(text: str) -> Iterator[_Matcher]:
    for index, word in enumerate(text.split(" ")):
        if index:
            yield _match_space
        if word:
            yield partial(_match_literal, word)


def _match_anything(printed: str, place: int) -> Iterable[int]:
    return range(place, len(printed) + 1)


def _match_space(printed: str, place: int) -> Iterable[int]:
    """A blank; none is needed where `...` stood for nothing and left another blank, or the edge of the line."""
    if printed[place : place + 1] == " ":
        yield place + 1
    if place in {0, len(printed)} or printed[place - 1] == " ":
        yield place


def _match_literal(text: str, printed: str, place: int) -> Iterable[int]:
    return (place + len(text),) if printed.startswith(text, place) else ()


def _match_number(text: str, tolerance: float, printed: str, place: int) -> Iterable[int]:
    yield from _match_literal(text, printed, place)
    other = NUMBER.match(printed, place)
    if other and _is_close(text, other.group(), tolerance):
        yield other.end()


def _is_close(expected: str, printed: str, tolerance: float) -> bool:
    one, other = expected.replace(",", ""), printed.replace(",", "")
    if one.lstrip("+-").isdecimal() and other.lstrip("+-").isdecimal():
        return int(one) == int(other)
    return isinf(tolerance) or abs(float(one) - float(other)) <= tolerance * abs(float(one))
