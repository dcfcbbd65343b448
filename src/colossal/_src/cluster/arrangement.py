# pyright: reportUnknownMemberType=false
"""How the ranks of a world are arranged along axes, and where one of them is: numbers, without a process group."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast, final

import torch

from colossal._src.cluster.axes import Axis, MeshAxis
from colossal.errors import MeshError


@final
@dataclass(frozen=True)
class MeshView:
    """All processes on some axes, and the place of this one."""

    ranks: torch.Tensor
    sizes: dict[Axis, int]
    place: dict[Axis, int]

    @classmethod
    def of(cls, ranks: torch.Tensor, sizes: Mapping[Any, int], own: int) -> Self:
        """Arrange the ranks."""
        arranged = ranks.reshape(*sizes.values())
        place = dict(zip(sizes, integers((arranged == own).nonzero()[0]), strict=True))
        return cls(arranged, dict(sizes), place)

    def list_along(self, axes: Sequence[Axis]) -> tuple[int, ...]:
        """List the ranks that differ from this one along these axes only; the last axis counts first."""
        index = tuple(slice(None) if name in axes else at for name, at in self.place.items())
        order = [name for name in self.place if name in axes]
        return tuple(integers(self.ranks[index].permute([order.index(axis) for axis in axes]).flatten()))


def integers(tensor: torch.Tensor) -> list[int]:
    return cast("list[int]", tensor.tolist())  # whose type depends on the number of dimensions


def fit_sizes(world_size: int, pp: int, dp: int | None, sp: int, tp: int) -> tuple[int, int, int, int]:
    given = {"pp": pp, "dp": 1 if dp is None else dp, "sp": sp, "tp": tp}
    for axis, size in given.items():
        if not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MeshError(f"The size of an axis is an integer, at least 1. Found {axis}={size!r}. Pass 1 or more.")
    taken = math.prod(given.values())
    if dp is None and world_size % taken == 0:
        return pp, world_size // taken, sp, tp
    if taken != world_size:
        sizes = " x ".join(f"{axis} {size}" for axis, size in given.items() if axis != "dp" or dp is not None)
        verb, fitting = ("equal", taken) if dp else ("divide", max(1, round(world_size / taken)) * taken)
        raise MeshError(
            f"The product of the axes must {verb} the number of processes. Found {sizes} = {taken} "
            f"in a world of {world_size}. Change a size, or start {fitting} processes."
        )
    return pp, given["dp"], sp, tp


def check_expert_ranks(ep: int, shape: Mapping[MeshAxis, int]) -> int:
    num_ranks = math.prod(shape.values()) // shape["pp"]
    if not isinstance(ep, int) or ep < 1 or num_ranks % ep:  # pyright: ignore[reportUnnecessaryIsInstance]
        fitting = ", ".join(str(each) for each in range(1, num_ranks + 1) if num_ranks % each == 0)
        raise MeshError(
            f"Experts are sharded over a divisor of the {num_ranks} ranks of a stage, those of dp, sp and tp. Found "
            f"ep={ep!r}. Pass one of {fitting}."
        )
    return ep


def arrange(shape: Mapping[MeshAxis, int], dp_outside: bool) -> torch.Tensor:
    """Number the processes, of shape (pp, dp, sp, tp)."""
    pp, dp, sp, tp = shape.values()
    if dp_outside:
        return torch.arange(pp * dp * sp * tp, device="cpu").view(dp, pp, sp, tp).transpose(0, 1)
    return torch.arange(pp * dp * sp * tp, device="cpu").view(pp, dp, sp, tp)
