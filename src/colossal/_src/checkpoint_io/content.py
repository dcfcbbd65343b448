"""What is to be saved, when each rank has some of it; and plain data as JSON, with its tensors taken out."""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.index_and_names import listing
from colossal._src.checkpoint_io.safetensors_file import split_blocks
from colossal._src.tensor import FlatLayout, Layout, Region, RegionLayout, layout_of, local_regions_of
from colossal.errors import CheckpointError, ConfigError

MIB = 1024**2


@final
@dataclass(frozen=True)
class Entry:
    """One tensor, or one value that is not a tensor, under one or several names."""

    names: tuple[str, ...]  # its names; the one that a format without aliases keeps comes first
    value: Any  # the tensor, which may be a DTensor, or the value; None for a tensor that other ranks hold
    # which rank holds which shard of the tensor; None for what is not a tensor
    layout: Layout | FlatLayout | RegionLayout | None
    dtype: torch.dtype | None  # the dtype of the tensor; None for what is not a tensor
    # whether ranks compute copies of the tensor that may differ, such as statistics of their own batches
    is_buffer: bool = False

    @classmethod
    def of(cls, names: Sequence[str], value: Any, ranks: Sequence[int], *, is_buffer: bool = False) -> "Entry":
        """Describe a value."""
        if not isinstance(value, torch.Tensor):
            return cls(tuple(names), value, None, None)
        layout = layout_of(value, ranks)
        if not set(layout.ranks) <= set(ranks):
            raise CheckpointError(
                f"All ranks that hold a shard of a tensor must save and load together. Found {names[0]!r} on ranks "
                f"{layout.ranks}, and only ranks {tuple(ranks)} here. Use the booster's own save and load, or "
                "CheckpointIO(ProcessGroupIO())."
            )
        return cls(tuple(names), value, layout, value.dtype, is_buffer)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self.layout.shape if self.layout else ()

    @property
    def itemsize(self) -> int:
        """Size of an element of the tensor in bytes."""
        return self.dtype.itemsize if self.dtype else 0

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_like(self) -> str:
        """What must be the same on all ranks that have some of it."""
        return f"{self.names} {self.dtype or type(self.value)} {self.shape}"

    @property
    def fingerprint(self) -> str:
        """What is the same on ranks that may speak for each other."""
        return f"{self.is_like} {self.layout!r}"

    def without_value(self) -> Self:
        """Leave the tensor out: what other ranks need to know of it."""
        return self if self.layout is None else replace(self, value=None)


@final
@dataclass(frozen=True)
class BlockWrite:
    """A block that one rank writes."""

    file: int  # number of the file
    name: str  # the name of the tensor
    block: Region  # the region of the tensor
    rank: int  # the global rank that writes it
    tensor: torch.Tensor | None  # the values of the region, on their device; None on other ranks


def plan_files(entries: Iterable[Entry], max_bytes: float) -> list[list[Entry]]:
    """Fill one file after the other, in order; an entry that is larger than a file gets one of its own."""
    if max_bytes <= 0:
        raise ConfigError(
            f"The size of a shard must be positive. Found size_per_shard={max_bytes / MIB:g} MB. The default is 1024."
        )
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if files[-1] and filled + entry.num_bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.num_bytes
    return files


def assign_blocks(files: Sequence[Sequence[Entry]], own_rank: int) -> list[BlockWrite]:
    """Choose for each block a rank that writes it: one that holds it, and has the least to write so far.

    Of buffers it is the first that holds them, whose values all ranks get before they train on: a file has the truth of
    one rank. All ranks come to the same result by themselves.
    """
    load: dict[int, int] = {}
    block_writes: list[BlockWrite] = []
    for number, entries in enumerate(files):
        for entry in entries:
            assert entry.layout is not None, "values that are no tensors have no blocks"
            itemsize = entry.itemsize
            own = dict(local_regions_of(entry.value, own_rank)) if own_rank in entry.layout.ranks else {}
            for region, holders in entry.layout.holders.items():
                for block in split_blocks(region, itemsize):
                    # the number breaks ties, so that all ranks plan the same
                    rank = min(holders) if entry.is_buffer else min(holders, key=lambda each: (load.get(each, 0), each))
                    load[rank] = load.get(rank, 0) + block.numel * itemsize
                    part = own[region].detach()[block.inside(region).slices] if rank == own_rank else None
                    block_writes.append(BlockWrite(number, entry.names[0], block, rank, part))
    return block_writes


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

    Replicas that differ are reported, see `replica_check`.

    Communication: all_gather_object, the writers, 16 bytes for each replicated tensor of a rank; and once more, a few
    hundred bytes for each tensor, if the ranks hold different ones.
    """
    from colossal._src.checkpoint_io.replica_check import replica_checksums, warn_of_different_replicas

    contents: list[Content] = []

    def describe() -> tuple[str, dict[int, int]]:
        contents.append(collect_content())
        return contents[0].fingerprint, replica_checksums(contents[0].entries, writers.rank)

    described = writers.gather(describe)
    prints = [print_ for print_, _ in described]
    warn_of_different_replicas(contents[0].entries, writers.rank, [sums for _, sums in described])
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


_SCALARS = (bool, int, float, str, type(None))
_TAGS = ("$tensor", "$tuple", "$dict", "$set", "$counter", "$dtype")
_SEPARATOR = "/"


def extract_tensors(tree: Any, path: tuple[str, ...] = ()) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take the tensors out of plain data."""
    tensors: dict[str, torch.Tensor] = {}
    return _dismantle(tree, path, tensors), tensors


def insert_tensors(skeleton: Any, tensor: Callable[[str], Any]) -> Any:
    """Put the tensors back."""
    if isinstance(skeleton, list):
        return [insert_tensors(item, tensor) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag, value = next(iter(skeleton.items()), ("", ""))
    if tag not in _TAGS:
        return {key: insert_tensors(item, tensor) for key, item in skeleton.items()}
    if tag == "$tensor":
        return tensor(value)
    if tag == "$dtype":
        return getattr(torch, value)
    items = [insert_tensors(item, tensor) for item in value]
    return {"$tuple": tuple, "$dict": dict, "$set": set, "$counter": _count}[tag](items)


def _dismantle(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = _SEPARATOR.join(path)
        tensors[name] = value
        return {"$tensor": name}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) in (dict, OrderedDict, Counter):
        return _dismantle_mapping(value, path, tensors)
    if type(value) in (list, tuple, set):
        items = [_dismantle(item, (*path, str(place)), tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"$set" if isinstance(value, set) else "$tuple": items}
    raise CheckpointError(
        "A checkpoint can hold tensors and plain data: numbers, strings, lists and dicts of them. Found a "
        f"{type(value).__name__} at {_SEPARATOR.join(path) or 'the top'}. Keep functions and objects out of the state."
    )


def _dismantle_mapping(value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    pairs = [(key, _dismantle(item, (*path, str(key)), tensors)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [list(pair) for pair in pairs]}
    return as_mapping(pairs)


def as_mapping(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Write a dict whose values are taken apart already."""
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [[_dismantle(key, (), {}), item] for key, item in pairs]}


def _count(pairs: list[list[Any]]) -> Counter[Any]:
    return Counter(dict(pairs))
