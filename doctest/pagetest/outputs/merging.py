"""Merging: new text for an output block, in which every line and every `...` of the old one stays that still holds."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from pagetest.outputs.matching import NUMBER, WILDCARD, first_difference, line_matches, normalize_lines

_TOKEN = re.compile(rf"{NUMBER.pattern}|\.\.\.|\w+|\s+|.")
_INSERTED, _REPLACED, _DELETED = 0.9, 1.0, 1.1  # a `...` matches at no cost: it must not gain by deleted lines
_MOST_PAIRS = 1_000_000  # some seconds of work

_Lines = list[tuple[str, str]]
_Place = tuple[int, int]
_Move = tuple[float, _Place | None, _Place | None]
_END: _Move = (0.0, None, None)


def merge_output(old: str, printed: str, exact: bool = False) -> str:
    """Makes text that fits what was printed; it is the old text where that does."""
    if not first_difference(old, printed, exact):
        return old
    one, other = _lines(old), _lines(printed)
    if len(one) * len(other) > _MOST_PAIRS:
        return _plain(other)

    def unlikeness(i: int, j: int) -> float:
        if line_matches(one[i][0], other[j][0], exact):
            return 0.0
        ours, theirs = (set(lines[index][0].split()) for lines, index in ((one, i), (other, j)))
        return _REPLACED - len(ours & theirs) / max(len(ours), len(theirs)) / 4

    steps = _align([line for line, _ in one], len(other), unlikeness)
    fresh = "\n".join(_merged_lines(one, other, list(steps), exact)).strip("\n") + "\n"
    is_proof = any(line != WILDCARD for _, line in normalize_lines(fresh))
    return fresh if is_proof and not first_difference(fresh, printed, exact) else _plain(other)


def _plain(lines: _Lines) -> str:
    return "\n".join(text for _, text in lines).strip("\n") + "\n"


def _lines(text: str) -> _Lines:
    """Each line that is not blank: normalized, and as it is together with the blank lines before it."""
    normalized, all_lines = normalize_lines(text), [line.rstrip() for line in re.split(r"\r\n|\n|\r", text)]
    starts = [-1, *(index for index, _ in normalized)]
    return [
        (line, "\n".join(all_lines[before + 1 : index + 1]))
        for (before, index), (_, line) in zip(pairwise(starts), normalized, strict=True)
    ]


def _merged_lines(one: _Lines, other: _Lines, steps: Sequence[tuple[int, int]], exact: bool) -> Iterator[str]:
    for i, j in steps:
        if j < 0:
            yield one[i][1]
        elif i >= 0 and WILDCARD in one[i][0]:
            yield _keep_wildcards(one[i][1], other[j][1], exact)
        else:
            yield other[j][1]


def _keep_wildcards(old: str, new: str, exact: bool) -> str:
    """The new line, with those `...` of the old one that still match something."""
    one, other = (_TOKEN.findall(text.strip()) for text in (old, new))

    def unlikeness(i: int, j: int) -> float:
        return float(one[i] != other[j] and not (one[i].isspace() and other[j].isspace()))

    parts = [one[i] if j < 0 else other[j] for i, j in _align(one, len(other), unlikeness)]
    for index, part in enumerate(parts):
        if part == WILDCARD and _fits([*parts[:index], *parts[index + 1 :]], new, exact):
            parts[index] = ""
    line = "".join(parts).strip()
    is_proof = line.replace(WILDCARD, "").strip() and _fits(parts, new, exact)
    return new[: len(new) - len(new.lstrip())] + line if is_proof else new


def _fits(parts: Sequence[str], printed: str, exact: bool) -> bool:
    return line_matches(" ".join("".join(parts).split()), " ".join(printed.split()), exact)


def _align(old: Sequence[str], size: int, unlikeness: Callable[[int, int], float]) -> Iterator[tuple[int, int]]:
    """The cheapest way from old items to new ones, where a `...` among the old matches any number of new ones."""
    # An old item is (i, -1) in the result, a new one (i, j) or (-1, j). `unlikeness` is the cost of the new item
    # j in the place of the old item i; 0 keeps the old one.
    best: dict[_Place, _Move] = {}
    for i in range(len(old), -1, -1):
        for j in range(size, -1, -1):
            best[i, j] = min(_moves(old, size, (i, j), unlikeness, best), key=lambda move: move[0], default=_END)
    place: _Place | None = (0, 0)
    while place:
        _, place, item = best[place]
        if item:
            yield item


def _moves(
    old: Sequence[str],
    size: int,
    place: _Place,
    unlikeness: Callable[[int, int], float],
    best: Mapping[_Place, _Move],
) -> Iterator[_Move]:
    """The moves from a place: the cost of the way, the next place, what goes into the result."""
    i, j = place
    if i < len(old) and old[i] == WILDCARD:
        yield best[i + 1, j][0], (i + 1, j), (i, -1)
        if j < size:
            yield best[i, j + 1][0], (i, j + 1), None
    elif i < len(old):
        if j < size:
            cost = unlikeness(i, j)
            yield cost + best[i + 1, j + 1][0], (i + 1, j + 1), (i, j if cost else -1)
        yield _DELETED + best[i + 1, j][0], (i + 1, j), None
    if j < size:
        yield _INSERTED + best[i, j + 1][0], (i, j + 1), (-1, j)
