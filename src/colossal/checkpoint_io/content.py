"""What is to be saved, when each rank has some of it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from colossal.checkpoint_io.entries import Entry
from colossal.checkpoint_io.naming import listing
from colossal.checkpoint_io.writers import Writers
from colossal.errors import CheckpointError
from colossal.tensor import BoxLayout


@final
@dataclass(frozen=True)
class Piece:
    """What is saved of one parameter, under a key.

    Args:
        entries: Its tensors.
        plain: Plain data that belong to it.
    """

    entries: tuple[Entry, ...]
    plain: Any = None

    @property
    def is_like(self) -> str:
        """What must be the same wherever the piece is known."""
        return f"{[each.is_like for each in self.entries]}"


@final
@dataclass(frozen=True)
class Content:
    """What a rank has of what is to be saved.

    Args:
        pieces: What is here, by key.
        order: All keys, in the order of the whole, the same on all ranks.
    """

    pieces: Mapping[Any, Piece]
    order: Sequence[Any]

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


def agree(writers: Writers, look: Callable[[], Content]) -> Content:
    """Let all ranks learn what there is to be saved, and who has it.

    Args:
        writers: The ranks that save.
        look: Finds what this rank has. It does not communicate.

    Returns:
        The content of all ranks, the same everywhere but for the values, which only those have that hold them.

    Raises:
        CheckpointError: `look` failed somewhere, or a rank lacks what another one says that it holds.

    Communication: all_gather_object, the writers, a few bytes; and once more, a few hundred bytes for each tensor, if
    the ranks hold different ones.
    """
    found: list[Content] = []
    prints = writers.gather(lambda: found.append(look()) or found[0].fingerprint)
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
    pieces: dict[Any, Piece] = {}
    for key in dict.fromkeys((*order, *(key for report, _ in told for key in report.pieces))):
        versions = [(report.pieces[key], ranks) for report, ranks in told if key in report.pieces]
        if versions:
            pieces[key] = _join_piece(key, versions, own.pieces.get(key))
    foreign = [key for key in pieces if key not in set(order)]
    absent = [key for key in order if key not in pieces]
    if foreign or absent or any(set(report.order) != set(order) for report, _ in told):
        raise _differ([*foreign, *absent] or order)
    return Content(pieces, order)


def _join_piece(key: Any, versions: Sequence[tuple[Piece, set[int]]], own: Piece | None) -> Piece:
    first, _ = versions[0]
    if any(piece.is_like != first.is_like for piece, _ in versions):
        raise _differ([key])
    reporters = {rank for _, ranks in versions for rank in ranks}
    entries = []
    for number, entry in enumerate(first.entries):
        layouts = [piece.entries[number].layout for piece, _ in versions]
        if any(not set(layout.ranks) <= reporters for layout in layouts if layout is not None):
            raise _differ([key])
        here = entry.value if own is None else own.entries[number].value
        joined = BoxLayout.joined(entry.shape, [each.holders for each in layouts if each is not None])
        entries.append(replace(entry, value=here, layout=joined if entry.layout is not None else None))
    return replace(first, entries=tuple(entries))


def _differ(keys: Sequence[Any]) -> CheckpointError:
    return CheckpointError(
        "All ranks must save the same names, shapes and dtypes, but for parts that they share among themselves. Found "
        f"that ranks differ in {listing(keys)}. Build the same model and optimizer on all of them."
    )
