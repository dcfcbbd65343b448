"""CAME: Adafactor that trusts an update the less, the more it differs from those before."""

from typing import Any, final

from torch.optim.optimizer import ParamsT

from colossal._src.nn.optimizer.factored import (
    SumRequests,
    clip_rms,
    divide_by_roots,
    factor_shapes,
    row_and_column_sums,
    update_factors,
)
from colossal._src.nn.optimizer.param_shard import (
    ParamShard,
    SetupDistributedMixin,
    ShardAwareOptimizer,
    sum_of_squares,
)
from colossal.errors import ConfigError


class CAMEBase(ShardAwareOptimizer):
    """The algorithm of both CAMEs."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: ``{"params": [...]}`` with the group's own hyperparameters.

        Raises:
            ConfigError: There is no learning rate.
        """
        if (self.defaults | param_group)["lr"] is None:
            raise ConfigError("CAME needs a learning rate. Found lr=None. Pass one, such as lr=2e-4.")
        super().add_param_group(param_group)

    def _update_shard(self, shard: ParamShard) -> SumRequests:
        group, placement, values = shard.group, shard.placement, shard.values
        (first, second, third), eps = group["betas"], group["eps"]
        rows, columns = factor_shapes(placement) if shard.is_matrix else ((), ())
        if shard.is_matrix:
            sums = yield row_and_column_sums(placement, shard.grad)
            means = shard.replicated_state("exp_avg_sq_row", rows), shard.replicated_state("exp_avg_sq_col", columns)
            update_factors(means, sums, second, eps[0], placement)
            update = divide_by_roots(placement, shard.grad, means)
        else:
            squares = shard.sharded_state("exp_avg_sq")
            squares.mul_(second).add_(shard.grad.square().add_(eps[0]), alpha=1 - second)
            update = shard.grad * squares.rsqrt()
        (total,) = yield [sum_of_squares(update)]
        clip_rms(update, total, placement, group["clip_threshold"])
        mean = shard.sharded_state("exp_avg").mul_(first).add_(update, alpha=1 - first)
        if shard.is_matrix:
            sums = yield row_and_column_sums(placement, update.sub_(mean))
            means = shard.replicated_state("exp_avg_res_row", rows), shard.replicated_state("exp_avg_res_col", columns)
            update_factors(means, sums, third, eps[1], placement)
            mean = divide_by_roots(placement, mean, means)
        decayed = values * group["weight_decay"]
        shard.subtract(decayed.add_(mean).mul_(group["lr"]))


@final
class CAME(CAMEBase):
    """CAME: means of squares by rows and columns, of the gradients and of how far updates stray from their mean.

    Tensors of more dimensions are stacks of matrices; of fewer, they have a mean of squares for each element, and their
    updates are trusted.

    Args:
        params: Parameters, named parameters, or parameter groups; full, DTensors, or ranges under ZeRO.
        lr: The learning rate, which has no default.
        eps: Added to the squares of gradients, and to the squared residuals of updates.
        clip_threshold: Upper limit of the root mean square of an update.
        betas: Decay rates of the mean of updates, of the second moment, and of the mean of squared residuals.
        weight_decay: Decoupled weight decay, which is multiplied by the learning rate.

    Raises:
        ConfigError: An argument is out of its range, or there is no learning rate.

    Communication: none for full parameters; else three all_reduces a step, the axes that shard them, of 4 bytes for
    each row and column twice, and of 4 for each parameter.

    Source: Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", 2023,
    https://arxiv.org/abs/2307.02047.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import CAME
        >>> weight = torch.nn.Parameter(torch.ones(3, 4))
        >>> optimizer = CAME([weight], lr=0.1)
        >>> weight.grad = torch.ones(3, 4)
        >>> optimizer.step()
        >>> sorted(name for name, state in optimizer.state[weight].items() if state.shape == weight.shape)
        ['exp_avg']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, _defaults(lr, eps, clip_threshold, betas, weight_decay))


@final
class DistributedCAME(SetupDistributedMixin, CAMEBase):
    """`CAME` for shards that `setup_distributed` describes.

    Args:
        params: Parameters, named parameters, or parameter groups.
        lr: The learning rate, which has no default.
        eps: Added to the squares of gradients, and to the squared residuals of updates.
        clip_threshold: Upper limit of the root mean square of an update.
        betas: Decay rates of the mean of updates, of the second moment, and of the mean of squared residuals.
        weight_decay: Decoupled weight decay, which is multiplied by the learning rate.

    Raises:
        ConfigError: An argument is out of its range, or there is no learning rate.

    Communication: three all_reduces a step, the axes that shard the parameters, of 4 bytes for each row and column
    twice, and of 4 for each parameter.

    Source: Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", 2023,
    https://arxiv.org/abs/2307.02047.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.optimizer import DistributedCAME
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     mesh = ParallelMesh(dp=2)
        ...     weight = torch.nn.Parameter(torch.ones(2, 3))
        ...     mine = torch.nn.Parameter(torch.ones(3))
        ...     optimizer = DistributedCAME([mine], lr=0.1)
        ...     optimizer.setup_distributed(None, mesh.group("dp"), {mine: weight}, is_zero=True)
        ...     mine.grad = torch.ones(3)
        ...     optimizer.step()
        ...     return tuple(optimizer.state[mine]["exp_avg_sq_col"].shape)
        >>> run_threads(program, 2)
        [(3,), (3,)]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, _defaults(lr, eps, clip_threshold, betas, weight_decay))


def _defaults(
    lr: float | None,
    eps: tuple[float, float],
    clip_threshold: float,
    betas: tuple[float, float, float],
    weight_decay: float,
) -> dict[str, Any]:
    return {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "betas": betas, "weight_decay": weight_decay}
