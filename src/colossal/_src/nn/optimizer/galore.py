"""GaLore: AdamW whose means live in a subspace of few dimensions, which follows the gradients."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Self, final

import torch
from torch import distributed as dist
from torch.optim.optimizer import ParamsT

from colossal._src.nn.optimizer.checked_optimizer import reject_option
from colossal._src.nn.optimizer.factored import SumRequests
from colossal._src.nn.optimizer.param_shard import ParamShard, SetupDistributedMixin, ShardAwareOptimizer
from colossal._src.tensor import Placement
from colossal.errors import ConfigError

_SIDES = {
    "std": lambda shape: (shape[0] < shape[1], shape[0] >= shape[1]),
    "reverse_std": lambda shape: (shape[0] >= shape[1], shape[0] < shape[1]),
    "left": lambda _: (True, False),
    "right": lambda _: (False, True),
    "full": lambda _: (True, True),
}


@final
@dataclass(frozen=True)
class Projection:
    """Orthonormal columns by which a matrix is multiplied on its left, and rows by which on its right."""

    left: torch.Tensor | None  # the columns, (rows of the matrix, rank); None to keep its rows
    right: torch.Tensor | None  # the rows, (rank, columns of the matrix); None to keep its columns

    @classmethod
    def of(cls, matrix: torch.Tensor, rank: int, proj_type: str) -> Self:
        """Find the leading singular subspace of a matrix."""
        is_left, is_right = projected_sides(proj_type, tuple(matrix.shape))
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        left, right = left[:, :rank], right[:rank]
        # a singular vector is determined up to its sign only: the largest element is made positive
        signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
        return cls(left * signs if is_left else None, right * signs.T if is_right else None)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of a projected matrix."""
        rows = shape[0] if self.left is None else self.left.shape[1]
        return rows, shape[1] if self.right is None else self.right.shape[0]

    def project(self, placement: Placement, local: torch.Tensor) -> torch.Tensor:
        """Project the local shard of a matrix."""
        low = local.new_zeros(self.shape_of(placement.shape))
        for view, left, right, at in self._steps(placement, local):
            moved = view if left is None else left.T @ view
            low[at] += moved if right is None else moved @ right.T
        return low

    def project_back(self, placement: Placement, low: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Project a low-rank matrix back to the local shard."""
        local = torch.empty_like(like)
        for view, left, right, at in self._steps(placement, local):
            moved = low[at] if left is None else left @ low[at]
            view.copy_(moved if right is None else moved @ right)
        return local

    def _steps(
        self, placement: Placement, local: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple[slice, slice]]]:
        """Each local region, the rows and columns of the projections for it, and its slices when projected."""
        for region, view in placement.views(local):
            rows, columns = region.slices
            left = None if self.left is None else self.left[rows]
            right = None if self.right is None else self.right[:, columns]
            yield view, left, right, (rows if left is None else slice(None), columns if right is None else slice(None))


def projected_sides(proj_type: str, shape: tuple[int, ...]) -> tuple[bool, bool]:
    """Return which sides of a matrix are projected."""
    if proj_type not in _SIDES:
        raise ConfigError(f"proj_type is one of {', '.join(_SIDES)}. Found {proj_type!r}. Pass one of them.")
    return _SIDES[proj_type](shape)


_GROUP = {"rank": 256, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_SIDE_NAMES = ("projection_left", "projection_right")
_MATRIX_DIMS = 2


def set_projection_defaults(group: dict[str, Any]) -> None:
    """Complete and check the entries of a group whose matrices are projected."""
    if "rank" in group:
        for name, value in _GROUP.items():
            group.setdefault(name, value)
        projected_sides(group["proj_type"], (1, 1))


def is_projected(shard: ParamShard) -> bool:
    """Whether a parameter is a matrix that is larger than the subspace."""
    shape = shard.placement.shape
    return len(shape) == _MATRIX_DIMS and min(shape) > shard.group.get("rank", inf)


class GaLoreBase(ShardAwareOptimizer):
    """The algorithm of GaLore over AdamW."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: ``{"params": [...]}`` with the group's own hyperparameters; with a ``rank``, its matrices are
                projected.
        """
        set_projection_defaults(param_group)
        super().add_param_group(param_group)

    def _update_shard(self, shard: ParamShard) -> SumRequests:
        group, values = shard.group, shard.values
        if is_projected(shard):
            projection = yield from projection_of(shard)
            (grad,) = yield [projection.project(shard.placement, shard.grad)]
            means = shard.replicated_state("exp_avg", grad.shape), shard.replicated_state("exp_avg_sq", grad.shape)
            update = projection.project_back(shard.placement, _direction(shard, grad, *means), shard.grad).mul_(
                group["scale"]
            )
        else:
            update = _direction(shard, shard.grad, shard.sharded_state("exp_avg"), shard.sharded_state("exp_avg_sq"))
        shard.subtract(update.add_(values, alpha=group["weight_decay"]).mul_(group["lr"]))


@final
class GaLoreAdamW(GaLoreBase):
    """GaLore: AdamW on the projections of gradients onto their leading singular vectors.

    Only matrices in groups with a ``rank`` are projected, as `get_galore_param_groups` makes them, and of these only
    those whose sides are longer; all else is updated as by AdamW. The subspace is recomputed from a full gradient
    every ``update_proj_gap`` steps.

    Args:
        params: Parameter groups; full, DTensors, or ranges under ZeRO.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled weight decay, which is multiplied by `lr`.

    Raises:
        ConfigError: An argument is out of its range.

    Communication: none for full parameters; else all_reduce, the axes that shard them, 4 bytes for each element of the
    projected gradients in one call a step; when subspaces are found, two more, of 4 bytes for each element of the
    gradients and of the subspaces.

    Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024,
    https://arxiv.org/abs/2403.03507.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import GaLoreAdamW, get_galore_param_groups
        >>> model = torch.nn.Linear(8, 6)
        >>> optimizer = GaLoreAdamW(get_galore_param_groups(model, weight_decay=0.0, rank=2), lr=0.1)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg"].shape)
        (2, 8)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, _defaults(lr, betas, eps, weight_decay))


@final
class GaLoreAdamW8bit(GaLoreBase):
    """`GaLoreAdamW` under the name and with the arguments of the one whose state has 8 bits.

    The state here is float32: the projection makes it small, and nothing is lost. Arguments that ask for what this does
    not do are refused.

    Args:
        params: Parameter groups; full, DTensors, or ranges under ZeRO.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled weight decay, which is multiplied by `lr`.
        nbits: 8 or 32; the state has 32 bits in any case.
        min_8bit_size: As by default: no state has 8 bits.
        percentile_clipping: As by default: gradients are not clipped.
        block_wise: As by default.
        is_paged: As by default: the state is on the device of the parameter.
        args: As by default.

    Raises:
        ConfigError: An argument is out of its range.
        UnsupportedError: An argument asks for what is not built.

    Communication: as `GaLoreAdamW`.

    Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024,
    https://arxiv.org/abs/2403.03507.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import GaLoreAdamW8bit, get_galore_param_groups
        >>> model = torch.nn.Linear(8, 6)
        >>> optimizer = GaLoreAdamW8bit(get_galore_param_groups(model, weight_decay=0.0, rank=2), lr=0.1)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.float32
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: object = None,
    ) -> None:
        _refuse_options(nbits, min_8bit_size, percentile_clipping, block_wise, is_paged, args)
        super().__init__(params, _defaults(lr, betas, eps, weight_decay))


@final
class DistGaloreAwamW(SetupDistributedMixin, GaLoreBase):
    """`GaLoreAdamW8bit` for shards that `setup_distributed` describes; the name is as it is documented.

    The states of projected parameters are replicated on all ranks; the decompositions are distributed over the ranks.

    Args:
        params: Parameter groups.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled weight decay, which is multiplied by `lr`.
        nbits: 8 or 32; the state has 32 bits in any case.
        min_8bit_size: As by default: no state has 8 bits.
        percentile_clipping: As by default: gradients are not clipped.
        block_wise: As by default.
        is_paged: As by default: the state is on the device of the parameter.
        args: As by default.

    Raises:
        ConfigError: An argument is out of its range.
        UnsupportedError: An argument asks for what is not built.

    Communication: all_reduce, the axes that shard the parameters, 4 bytes for each element of the projected gradients
    in one call a step; when subspaces are found, two more, of 4 bytes for each element of the gradients and of the
    subspaces.

    Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024,
    https://arxiv.org/abs/2403.03507.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.optimizer import DistGaloreAwamW
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     mesh = ParallelMesh(dp=2)
        ...     weight = torch.nn.Parameter(torch.ones(2, 3))
        ...     mine = torch.nn.Parameter(torch.ones(3))
        ...     optimizer = DistGaloreAwamW([{"params": [mine], "rank": 1}], lr=0.1)
        ...     optimizer.setup_distributed(None, mesh.group("dp"), {mine: weight}, is_zero=True)
        ...     mine.grad = torch.ones(3)
        ...     optimizer.step()
        ...     return tuple(optimizer.state[mine]["exp_avg"].shape)
        >>> run_threads(program, 2)
        [(1, 3), (1, 3)]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: object = None,
    ) -> None:
        _refuse_options(nbits, min_8bit_size, percentile_clipping, block_wise, is_paged, args)
        super().__init__(params, _defaults(lr, betas, eps, weight_decay))


def _defaults(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


def _refuse_options(
    nbits: int, min_8bit_size: int, percentile_clipping: int, block_wise: bool, is_paged: bool, args: object
) -> None:
    built = {
        "nbits": (nbits, (8, 32)),
        "min_8bit_size": (min_8bit_size, (4096,)),
        "percentile_clipping": (percentile_clipping, (100,)),
        "block_wise": (block_wise, (True,)),
        "is_paged": (is_paged, (False,)),
        "args": (args, (None,)),
    }
    for name, (value, allowed) in built.items():
        if value not in allowed:
            reject_option(name, value, "Leave it out: the state is small, and float32.")


def _direction(shard: ParamShard, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Bring means up to date, and return the update that Adam would make, before the learning rate."""
    beta1, beta2 = shard.group["betas"]
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (second / (1 - beta2**shard.step)).sqrt_().add_(shard.group["eps"])
    return (first / (1 - beta1**shard.step)).div_(root)


def projection_of(shard: ParamShard) -> Generator[list[torch.Tensor], list[torch.Tensor], Projection]:
    """The projection of a parameter; every so many steps it is found anew, by one rank for all."""
    placement, group = shard.placement, shard.group
    rank = group["rank"]
    shapes = (placement.shape[0], rank), (rank, placement.shape[1])
    kept = [
        shard.replicated_state(name, shape) if is_used else None
        for name, shape, is_used in zip(
            _SIDE_NAMES, shapes, projected_sides(group["proj_type"], placement.shape), strict=True
        )
    ]
    sides = [side for side in kept if side is not None]
    if (shard.step - 1) % group["update_proj_gap"] == 0:
        full = shard.grad.new_zeros(placement.shape)
        for region, view in placement.views(shard.grad):
            full[region.slices] = view
        (full,) = yield [full]
        # the decompositions of several parameters are spread over the ranks
        is_mine = all(dist.get_rank(one) == shard.index % dist.get_world_size(one) for one in placement.shard_groups)
        found = Projection.of(full, rank, group["proj_type"]) if is_mine else None
        pairs = zip((found.left, found.right) if found else (None, None), kept, strict=True)
        # the other ranks add zeros, so that the sum is what the one rank has found
        own = [torch.zeros_like(side) if new is None else new for new, side in pairs if side is not None]
        for side, total in zip(sides, (yield own), strict=True):
            side.copy_(total)
    return Projection(*kept)
