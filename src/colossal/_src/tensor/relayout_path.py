"""The cheapest way from one layout to another.

[Note: search]
A layout has few successors (one axis moves at a time), but there are many paths. Greedy search always goes to the
successor that looks most like the target; it is quick, and pays too much where a detour keeps the tensor small. Here
the search is A*: it goes on from the layout with the least sum of what was paid and of what is left to pay at least.
That bound takes each axis by itself, as if the tensor were sharded by all axes at the time: each step moves one axis,
so the bound never exceeds the truth, and the first path that arrives is a cheapest one.

Source: Hart, Nilsson, Raphael, "A Formal Basis for the Heuristic Determination of Minimum Cost Paths", 1968,
https://doi.org/10.1109/TSSC.1968.300136.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import final

from colossal._src.cluster import LinkCost, LinkOp, collective_cost_factors
from colossal._src.tensor.layout import Layout
from colossal._src.tensor.relayout_step import (
    RelayoutStep,
    Spec,
    collective_numel,
    layout_difference,
    neighbor_specs,
    one_step_layouts,
    with_spec,
)
from colossal.errors import PlanError

_Price = Callable[[LinkOp, int, float], float]
"""What a collective costs along an axis of the grid, for a full tensor of so many bytes."""

_STEP = 2.0**-20
"""Without measured links, the fixed cost of a collective: of two paths that send as much, the shorter one wins."""

_MAX_CACHED = 4096


@final
@dataclass(frozen=True)
class LayoutPath:
    """A way from one layout to another.

    Args:
        layouts: All layouts on it, the first and the last one included.
        steps: The steps between them.
        step_bytes: Bytes that a rank sends in each step.
        step_seconds: Predicted seconds of each step; None if the links were not measured.

    Example:
        >>> from colossal.tensor import Layout, LayoutPath, plan_relayout
        >>> source, target = (Layout.parse(text, (8, 8), grid=(2, 2)) for text in ("S01R", "RS0"))
        >>> path: LayoutPath = plan_relayout(source, target, itemsize=4)
        >>> path.num_bytes
        128
        >>> print(path)
        S01R -> S0R -> RS0
        all_gather     axis 1           64 bytes
        all_to_all     axis 0           64 bytes
        total                          128 bytes
    """

    layouts: tuple[Layout, ...]
    steps: tuple[RelayoutStep, ...]
    step_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank sends on the full path."""
        return sum(self.step_bytes)

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of the full path; None if the links were not measured."""
        return None if self.step_seconds is None else sum(self.step_seconds)

    def __str__(self) -> str:
        """The way, and a line for each step with bytes and predicted time."""
        rows = [" -> ".join(str(layout) for layout in self.layouts)]
        for i, step in enumerate(self.steps):
            name = self.layouts[0].axes[step.axis] if self.layouts[0].axes else step.axis
            rows.append(f"{step.op:<15}axis {name:<4}{self.step_bytes[i]:>10,} bytes" + self._time(i))
        total = "" if self.seconds is None else f"{1e6 * self.seconds:>12.1f} us"
        return "\n".join([*rows, f"{'total':<24}{self.num_bytes:>10,} bytes" + total])

    def _time(self, i: int) -> str:
        return "" if self.step_seconds is None else f"{1e6 * self.step_seconds[i]:>12.1f} us"


_PATHS: dict[tuple[Layout, Layout, int, int], tuple[LayoutPath, LinkCost | None]] = {}


def plan_relayout(source: Layout, target: Layout, itemsize: int, link_cost: LinkCost | None = None) -> LayoutPath:
    """Find the cheapest way from one layout to another; what was found once is remembered.

    Args:
        source: The present layout of the tensor.
        target: The layout to convert to: the same tensor, on the same ranks and axes.
        itemsize: Bytes of an element.
        link_cost: What the axes cost; the layouts must name theirs. Without it, or if an axis was not measured, the
            cheapest way is the one that sends the fewest bytes, and of several such the one with the fewest steps.

    Returns:
        The way.

    Raises:
        PlanError: The layouts are not of one tensor on one grid, or the target has partial sums that the source has
            not: there is no one way to make summands.

    Example:
        >>> from colossal.tensor import Layout, plan_relayout
        >>> source, target = (Layout.parse(text, (8, 8, 8), grid=(2, 2)) for text in ("S01RR", "RS01R"))
        >>> print(plan_relayout(source, target, itemsize=4))
        S01RR -> S0RS1 -> RS0S1 -> RS01R
        all_to_all     axis 1          256 bytes
        all_to_all     axis 0          256 bytes
        all_to_all     axis 1          256 bytes
        total                          768 bytes
    """
    key = source, target, itemsize, id(link_cost)
    found = _PATHS.get(key)
    if found is None:
        _check_pair(source, target)
        if len(_PATHS) >= _MAX_CACHED:
            _PATHS.clear()
        path = _search(source, target, itemsize, _measured(link_cost, source))
        found = _PATHS[key] = path, link_cost  # which keeps the costs, so that no others get their id
    return found[0]


def greedy_path(source: Layout, target: Layout, itemsize: int) -> LayoutPath:
    """Find a way by always going to the layout that differs least from the target, as the first published search did.

    It is here to be compared with: `plan_relayout` is never worse.

    Args:
        source: The present layout of the tensor.
        target: The layout to convert to.
        itemsize: Bytes of an element.

    Returns:
        A way, often but not always the cheapest.

    Raises:
        PlanError: As in `plan_relayout`.

    Example:
        >>> from colossal.tensor import Layout, greedy_path
        >>> source, target = (Layout.parse(text, (8, 8, 8), grid=(2, 2)) for text in ("S01RR", "RS01R"))
        >>> print(greedy_path(source, target, itemsize=4))
        S01RR -> S0RR -> RS0R -> RS01R
        all_gather     axis 1          512 bytes
        all_to_all     axis 0          512 bytes
        shard          axis 1            0 bytes
        total                        1,024 bytes
    """
    _check_pair(source, target)
    layout = source
    steps: list[tuple[RelayoutStep, Spec]] = []
    while layout != target:
        step, layout = min(one_step_layouts(layout), key=lambda candidate: layout_difference(candidate[1], target))
        steps.append((step, (layout.dims, layout.partial)))
    return _path(source, steps, itemsize, None)


def sent_bytes(layout: Layout, spec: Spec, step: RelayoutStep, itemsize: int) -> int:
    """Return the bytes that a rank sends in a step."""
    if step.op == "shard":
        return 0
    size = layout.grid[step.axis]
    passes = 2 if step.op == "all_reduce" else 1
    return passes * collective_numel(layout, spec, step) * itemsize * (size - 1) // size


def _search(source: Layout, target: Layout, itemsize: int, link_cost: LinkCost | None) -> LayoutPath:
    price = _price(source, link_cost)
    start, goal = (source.dims, source.partial), (target.dims, target.partial)
    bound = _Bound(source, goal, itemsize, price)
    paid, came = {start: 0.0}, dict[Spec, tuple[Spec, RelayoutStep]]()
    ticket = count()  # of two equal ones, all ranks take the first
    heap = [(bound(start), next(ticket), 0.0, start)]
    while heap:
        _, _, spent, spec = heappop(heap)
        if spec == goal:
            break
        # A cheaper path to it was found after this entry had been pushed.
        if spent > paid[spec]:
            continue
        for step, following in neighbor_specs(spec, len(source.grid)):
            cost = spent
            if step.op != "shard":
                cost += price(step.op, step.axis, collective_numel(source, spec, step) * itemsize)
            if cost < paid.get(following, math.inf):
                paid[following], came[following] = cost, (spec, step)
                heappush(heap, (cost + bound(following), next(ticket), cost, following))
    steps: list[tuple[RelayoutStep, Spec]] = []
    while goal != start:
        before, step = came[goal]
        steps.append((step, goal))
        goal = before
    return _path(source, steps[::-1], itemsize, link_cost)


class _Bound:
    """The least that is left to pay: for each axis what it must do at least, on the smallest tensor there can be."""

    def __init__(self, layout: Layout, goal: Spec, itemsize: int, price: _Price) -> None:
        least = math.prod(layout.shape) * itemsize / math.prod(layout.grid)
        self._wanted = _roles(goal, len(layout.grid))
        self._gather: list[float] = []
        self._move: list[float] = []
        self._add: list[float] = []
        for axis, size in enumerate(layout.grid):
            gather = price("all_gather", axis, size * least)
            self._gather.append(gather)
            self._move.append(min(gather, price("all_to_all", axis, least)))
            summed = [price(op, axis, size * least) for op in ("reduce_scatter", "all_reduce")]
            self._add.append(min(summed))

    def __call__(self, spec: Spec) -> float:
        total = 0.0
        dims, partial = spec
        for axis in partial:
            if self._wanted[axis] != _PARTIAL:
                total += self._add[axis]
        for dim, axes in enumerate(dims):
            for axis in axes:
                wanted = self._wanted[axis]
                if wanted != dim:
                    total += self._gather[axis] if wanted == _UNSHARDED else self._move[axis]
        return total


_UNSHARDED, _PARTIAL = -1, -2


def _roles(spec: Spec, num_axes: int) -> list[int]:
    """The dimension that each axis shards."""
    roles = [_UNSHARDED] * num_axes
    for axis in spec[1]:
        roles[axis] = _PARTIAL
    for dim, axes in enumerate(spec[0]):
        for axis in axes:
            roles[axis] = dim
    return roles


def _price(layout: Layout, link_cost: LinkCost | None) -> _Price:
    if link_cost is not None:
        return lambda op, axis, num_bytes: link_cost.seconds(op, layout.axes[axis], num_bytes, layout.grid[axis])
    slopes = [{op: collective_cost_factors(op, size)[1] for op in ("all_gather", "all_reduce")} for size in layout.grid]
    return lambda op, axis, num_bytes: (
        slopes[axis]["all_reduce" if op == "all_reduce" else "all_gather"] * num_bytes + _STEP
    )


def _measured(link_cost: LinkCost | None, layout: Layout) -> LinkCost | None:
    if link_cost is None or not layout.axes:
        return None
    needed = {axis for axis, size in zip(layout.axes, layout.grid, strict=True) if size > 1}
    # All axes or none: seconds of some cannot be compared with bytes of others.
    return link_cost if needed <= set(link_cost.axes) else None


def _path(
    source: Layout, steps: list[tuple[RelayoutStep, Spec]], itemsize: int, link_cost: LinkCost | None
) -> LayoutPath:
    specs: list[Spec] = [(source.dims, source.partial), *(spec for _, spec in steps)]
    sent = tuple(sent_bytes(source, spec, step, itemsize) for spec, (step, _) in zip(specs, steps, strict=False))
    seconds = None
    if link_cost is not None:
        price = _price(source, link_cost)
        seconds = tuple(
            0.0 if step.op == "shard" else price(step.op, step.axis, collective_numel(source, spec, step) * itemsize)
            for spec, (step, _) in zip(specs, steps, strict=False)
        )
    return LayoutPath(tuple(with_spec(source, spec) for spec in specs), tuple(s for s, _ in steps), sent, seconds)


def _check_pair(source: Layout, target: Layout) -> None:
    same = ("shape", "ranks", "grid", "groups", "axes")
    differing = [name for name in same if getattr(source, name) != getattr(target, name)]
    if differing:
        raise PlanError(
            "A tensor is converted between layouts of its own shape, on the same ranks and axes. Found "
            + ", ".join(f"{name} {getattr(source, name)} and {getattr(target, name)}" for name in differing)
            + ". Make both layouts of one tensor and one grid."
        )
    if not {*target.partial} <= {*source.partial}:
        raise PlanError(
            f"A conversion adds partial sums up, and makes none. Found the source {source} and the target {target}. "
            "Let the target have no P, or only that of the source."
        )
