"""What is to be saved, when each rank has some of it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.entries import Entry
from colossal._src.checkpoint_io.naming import listing
from colossal._src.tensor import RegionLayout
from colossal.errors import CheckpointError


@final
@dataclass(frozen=True)
class ParameterContent:
    """What is saved of one parameter, under a key."""

    entries: tuple[Entry, ...]  # its tensors
    plain: Any = None  # plain data that belong to it

    @property
    def is_like(self) -> str:
        """What must be equal on all ranks that have the parameter."""
        return f"{[each.is_like for each in self.entries]}"


@final
@dataclass(frozen=True)
class Content:
    """The entries of the state that a rank has."""

    parameters: Mapping[Any, ParameterContent]  # what this rank has, by key
    order: Sequence[Any]  # all keys, in the order of the full state, the same on all ranks

    @property
    def entries(self) -> list[Entry]:
        """All tensors, in the order of the full state."""
        return [entry for key in self.order if key in self.parameters for entry in self.parameters[key].entries]

    @property
    def plain(self) -> dict[Any, Any]:
        """The plain data by key, in the order of the full state."""
        return {key: self.parameters[key].plain for key in self.order if key in self.parameters}

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that have the same entries."""
        prints = "".join(
            f"{key} {[each.fingerprint for each in parameter.entries]}" for key, parameter in self.parameters.items()
        )
        return hashlib.sha256(prints.encode()).hexdigest()

    def without_values(self) -> Self:
        """Drop the values: a description that can be sent to other ranks."""
        parameters = {
            key: replace(parameter, entries=tuple(entry.without_value() for entry in parameter.entries))
            for key, parameter in self.parameters.items()
        }
        return replace(self, parameters=parameters)


def agree(writers: CheckpointGroup, collect_content: Callable[[], Content]) -> Content:
    """Exchange descriptions of the state, so that all ranks know what is saved and which rank has it.

    Communication: all_gather_object, the writers, a few bytes; and once more, a few hundred bytes for each tensor, if
    the ranks hold different ones.
    """
    contents: list[Content] = []
    prints = writers.gather(lambda: contents.append(collect_content()) or contents[0].fingerprint)
    if len(set(prints)) == 1:
        return contents[0]
    position = writers.ranks.index(writers.rank)
    reports_own = prints.index(prints[position]) == position  # one rank reports for all that have the same content
    reports = writers.gather(lambda: contents[0].without_values() if reports_own else None)
    by_print = {print_: report for print_, report in zip(prints, reports, strict=True) if report is not None}
    reports_by_ranks = [
        (report, {rank for rank, other in zip(writers.ranks, prints, strict=True) if other == print_})
        for print_, report in by_print.items()
    ]
    return _merge_content(contents[0], reports_by_ranks)


def _merge_content(own: Content, reports_by_ranks: Sequence[tuple[Content, set[int]]]) -> Content:
    """Merge the reports of all ranks; every rank gets the same result."""
    order = reports_by_ranks[0][0].order
    versions: dict[Any, list[tuple[ParameterContent, set[int]]]] = {key: [] for key in order}
    for report, ranks in reports_by_ranks:
        for key, parameter in report.parameters.items():
            versions.setdefault(key, []).append((parameter, ranks))
    orders = {key for report, _ in reports_by_ranks for key in set(report.order) ^ set(order)}
    if wrong := [key for key, reported in versions.items() if key in orders or not _agree_on(reported)]:
        raise CheckpointError(
            "All ranks must save the same names, shapes and dtypes, except for states partitioned over them. "
            f"Found that ranks differ in {listing(wrong)}. Build the same model and optimizer on all of them."
        )
    return Content(
        {key: _merge_parameter(reported, own.parameters.get(key)) for key, reported in versions.items()}, order
    )


def _agree_on(versions: Sequence[tuple[ParameterContent, set[int]]]) -> bool:
    """Whether all ranks of the layout of a parameter report it, and report the same."""
    reporting_ranks = {rank for _, ranks in versions for rank in ranks}
    layouts = [entry.layout for parameter, _ in versions for entry in parameter.entries if entry.layout is not None]
    is_known = all(set(layout.ranks) <= reporting_ranks for layout in layouts)
    return is_known and len({parameter.is_like for parameter, _ in versions}) == 1


def _merge_parameter(
    versions: Sequence[tuple[ParameterContent, set[int]]], own: ParameterContent | None
) -> ParameterContent:
    first, entries = versions[0][0], []
    for number, entry in enumerate(first.entries):
        entry = entry if own is None else replace(entry, value=own.entries[number].value)  # noqa: PLW2901
        layouts = [parameter.entries[number].layout for parameter, _ in versions]
        holders = [layout.holders for layout in layouts if layout is not None]
        entries.append(replace(entry, layout=RegionLayout.merged(entry.shape, holders)) if holders else entry)
    return replace(first, entries=tuple(entries))
