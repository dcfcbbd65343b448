"""The single steps by which one layout becomes another, and how far apart two layouts are."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, final

from colossal._src.tensor.layout import Layout, padded_length

StepOp = Literal["shard", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"]

Spec = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""What a step changes of a layout: the axes of each dimension, and those of partial sums."""

_TO_TAKE_AWAY, _TO_ADD = 3, 1


@final
@dataclass(frozen=True)
class RelayoutStep:
    """One axis of the grid changes what it does to a tensor.

    Args:
        op: ``"shard"`` (each rank keeps a part of what it has), or the collective that it takes.
        axis: The axis of the layout's grid.
        source_dim: The dimension that the axis sharded, as its innermost one; None if it sharded none.
        target_dim: The dimension that it shards afterwards, as its innermost one; None if none.

    Example:
        >>> from colossal.tensor import Layout, RelayoutStep, one_step_layouts
        >>> step, layout = one_step_layouts(Layout.parse("S01RR", (8, 8, 8), grid=(2, 2)))[0]
        >>> step == RelayoutStep("all_gather", axis=1, source_dim=0), str(layout)
        (True, 'S0RR')
    """

    op: StepOp
    axis: int
    source_dim: int | None = None
    target_dim: int | None = None


def one_step_layouts(layout: Layout) -> list[tuple[RelayoutStep, Layout]]:
    """List all layouts that are one step away.

    Args:
        layout: Where to begin.

    Returns:
        Pairs of a step and the layout after it: first those by all-gather, then those by sharding, by all-to-all, and
        for partial sums those by all-reduce and reduce-scatter.

    Example:
        >>> from colossal.tensor import Layout, one_step_layouts
        >>> for step, layout in one_step_layouts(Layout.parse("S01RR", (8, 8, 8), grid=(2, 2))):
        ...     print(step.op, layout)
        all_gather S0RR
        all_to_all S0S1R
        all_to_all S0RS1
        >>> [str(behind) for _, behind in one_step_layouts(Layout.parse("RP0", (4,), grid=(2,)))]
        ['R', 'S0']
    """
    found = neighbor_specs((layout.dims, layout.partial), len(layout.grid))
    return [(step, with_spec(layout, spec)) for step, spec in found]


def layout_difference(source: Layout, target: Layout) -> int:
    """Estimate how far it is from one layout to another.

    Args:
        source: A layout.
        target: Another one of the same tensor.

    Returns:
        For each dimension, 3 for each axis that must be taken away from the inside before the rest agrees, and 1 for
        each that must be added; 3 for each partial sum to add up.

    Example:
        >>> from colossal.tensor import Layout, layout_difference
        >>> target = Layout.parse("RS01R", (8, 8, 8), grid=(2, 2))
        >>> layouts = [Layout.parse(text, (8, 8, 8), grid=(2, 2)) for text in ("S0RR", "RS0R", "RS01R")]
        >>> [layout_difference(layout, target) for layout in layouts]
        [5, 1, 0]
    """
    total = _TO_TAKE_AWAY * len({*source.partial} - {*target.partial})
    for has, wants in zip(source.dims, target.dims, strict=True):
        common = 0
        while common < min(len(has), len(wants)) and has[common] == wants[common]:
            common += 1
        total += _TO_TAKE_AWAY * (len(has) - common) + _TO_ADD * (len(wants) - common)
    return total


def with_spec(layout: Layout, spec: Spec) -> Layout:
    """Return a layout with other axes on its dimensions."""
    return replace(layout, dims=spec[0], partial=spec[1])


@lru_cache(1 << 15)
def neighbor_specs(spec: Spec, num_axes: int) -> tuple[tuple[RelayoutStep, Spec], ...]:
    """List what is one step away; it depends on nothing but the axes, so all tensors use the same list."""
    dims, partial = spec
    # Only the innermost axis can leave a dimension: an outer one shards the blocks that the inner ones split further.
    inner = [(dim, axes[-1]) for dim, axes in enumerate(dims) if axes]
    free = [axis for axis in range(num_axes) if axis not in partial and not any(axis in axes for axes in dims)]
    every = range(len(dims))
    steps = [RelayoutStep("all_gather", axis, dim) for dim, axis in inner]
    steps += [RelayoutStep("shard", axis, None, dim) for axis in free for dim in every]
    steps += [RelayoutStep("all_to_all", axis, dim, other) for dim, axis in inner for other in every if other != dim]
    steps += [RelayoutStep("all_reduce", axis) for axis in partial]
    steps += [RelayoutStep("reduce_scatter", axis, None, dim) for axis in partial for dim in every]
    return tuple((step, _apply_step(spec, step)) for step in steps)


def collective_numel(layout: Layout, spec: Spec, step: RelayoutStep) -> int:
    """Count the elements of the tensor that a step's collective handles, as `Channel` counts them, with padding."""
    if step.op == "shard":
        return 0
    dims = list(spec[0])
    if step.target_dim is not None:
        dims[step.target_dim] = (*dims[step.target_dim], step.axis)
    total = 1 if step.op == "all_reduce" else layout.grid[step.axis]
    for dim, axes in enumerate(dims):
        total *= padded_length(layout, dim, axes)
    return total


def _apply_step(spec: Spec, step: RelayoutStep) -> Spec:
    dims, partial = list(spec[0]), spec[1]
    if step.source_dim is not None:
        dims[step.source_dim] = dims[step.source_dim][:-1]
    if step.target_dim is not None:
        dims[step.target_dim] = (*dims[step.target_dim], step.axis)
    return tuple(dims), tuple(axis for axis in partial if axis != step.axis)
