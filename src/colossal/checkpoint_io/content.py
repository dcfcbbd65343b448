"""What is to be saved, when each rank has some of it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from colossal.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal.checkpoint_io.entries import Entry
from colossal.checkpoint_io.naming import listing
from colossal.errors import CheckpointError
from colossal.tensor import RegionLayout


@final
@dataclass(frozen=True)
class ParameterContent:
    """What is saved of one parameter, under a key."""

    entries: tuple[Entry, ...]  # its tensors
    plain: Any = None  # plain data that belong to it

    @property
    def is_like(self) -> str:
        """What must be the same wherever the piece is known."""
        return f"{[each.is_like for each in self.entries]}"


@final
@dataclass(frozen=True)
class Content:
    """What a rank has of what is to be saved."""

    pieces: Mapping[Any, ParameterContent]  # what is here, by key
    order: Sequence[Any]  # all keys, in the order of the whole, the same on all ranks

    @property
    def entries(self) -> list[Entry]:
        """All tensors, in the order of the whole."""
        return [entry for key in self.order if key in self.pieces for entry in self.pieces[key].entries]

    @property
    def plain(self) -> dict[Any, Any]:
        """The plain data by key, in the order of the whole."""
        return {key: self.pieces[key].plain for key in self.order if key in self.pieces}

    @property
    def fingerprint(self) -> str:
        """What is the same on ranks that have the same."""
        prints = "".join(f"{key} {[each.fingerprint for each in piece.entries]}" for key, piece in self.pieces.items())
        return hashlib.sha256(prints.encode()).hexdigest()

    def without_values(self) -> Self:
        """Leave out what is only here: a description that other ranks can be sent."""
        pieces = {
            key: replace(piece, entries=tuple(entry.without_value() for entry in piece.entries))
            for key, piece in self.pieces.items()
        }
        return replace(self, pieces=pieces)


def agree(writers: CheckpointGroup, collect_content: Callable[[], Content]) -> Content:
    """Let all ranks learn what there is to be saved, and who has it.

    Communication: all_gather_object, the writers, a few bytes; and once more, a few hundred bytes for each tensor, if
    the ranks hold different ones.
    """
    found: list[Content] = []
    prints = writers.gather(lambda: found.append(collect_content()) or found[0].fingerprint)
    if len(set(prints)) == 1:
        return found[0]
    place = writers.ranks.index(writers.rank)
    speaks = prints.index(prints[place]) == place  # one rank speaks for all that have the same
    reports = writers.gather(lambda: found[0].without_values() if speaks else None)
    by_print = {print_: report for print_, report in zip(prints, reports, strict=True) if report is not None}
    told = [
        (report, {rank for rank, other in zip(writers.ranks, prints, strict=True) if other == print_})
        for print_, report in by_print.items()
    ]
    return _join(found[0], told)


def _join(own: Content, told: Sequence[tuple[Content, set[int]]]) -> Content:
    """Put together what groups of ranks told; all of them come to the same result."""
    order = told[0][0].order
    versions: dict[Any, list[tuple[ParameterContent, set[int]]]] = {key: [] for key in order}
    for report, ranks in told:
        for key, piece in report.pieces.items():
            versions.setdefault(key, []).append((piece, ranks))
    orders = {key for report, _ in told for key in set(report.order) ^ set(order)}
    if wrong := [key for key, found in versions.items() if key in orders or not _agree_on(found)]:
        raise CheckpointError(
            "All ranks must save the same names, shapes and dtypes, but for parts that they share among themselves. "
            f"Found that ranks differ in {listing(wrong)}. Build the same model and optimizer on all of them."
        )
    return Content({key: _join_piece(found, own.pieces.get(key)) for key, found in versions.items()}, order)


def _agree_on(versions: Sequence[tuple[ParameterContent, set[int]]]) -> bool:
    """Tell whether all that know a piece say the same of it, and all that should know it do."""
    told_by = {rank for _, ranks in versions for rank in ranks}
    layouts = [entry.layout for piece, _ in versions for entry in piece.entries if entry.layout is not None]
    is_known = all(set(layout.ranks) <= told_by for layout in layouts)
    return is_known and len({piece.is_like for piece, _ in versions}) == 1


def _join_piece(
    versions: Sequence[tuple[ParameterContent, set[int]]], own: ParameterContent | None
) -> ParameterContent:
    first, entries = versions[0][0], []
    for number, entry in enumerate(first.entries):
        entry = entry if own is None else replace(entry, value=own.entries[number].value)  # noqa: PLW2901
        layouts = [piece.entries[number].layout for piece, _ in versions]
        holders = [layout.holders for layout in layouts if layout is not None]
        entries.append(replace(entry, layout=RegionLayout.merged(entry.shape, holders)) if holders else entry)
    return replace(first, entries=tuple(entries))
