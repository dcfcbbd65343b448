"""Adafactor: adaptive rates at the cost of a number for each row and column."""

from typing import Any, final

import torch
from torch.optim.optimizer import ParamsT

from colossal._src.nn.optimizer.factored import (
    SumRequests,
    clip_rms,
    divide_by_roots,
    factor_shapes,
    rms,
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

_LARGEST_STEP, _WARMUP_STEP = 1e-2, 1e-6


class AdafactorBase(ShardAwareOptimizer):
    """The algorithm of all Adafactors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: ``{"params": [...]}`` with the group's own hyperparameters.

        Raises:
            ConfigError: There is both a learning rate and one that the steps decide, or none.
        """
        group = self.defaults | param_group
        if (group["lr"] is None) != group["relative_step"] or group["warmup_init"] > group["relative_step"]:
            raise ConfigError(
                "Adafactor has a learning rate, or relative_step=True, which warmup_init needs. Found "
                f"lr={group['lr']}, relative_step={group['relative_step']}, warmup_init={group['warmup_init']}. "
                "Pass lr with relative_step=False, or leave lr out."
            )
        super().add_param_group(param_group)

    def _update_shard(self, shard: ParamShard) -> SumRequests:
        group, placement, values = shard.group, shard.placement, shard.values
        kept = 1.0 - shard.step ** group["decay_rate"]
        own = sum_of_squares(values)
        if shard.is_matrix:
            own, *sums = yield [own, *row_and_column_sums(placement, shard.grad)]
            rows, columns = factor_shapes(placement)
            means = shard.replicated_state("exp_avg_sq_row", rows), shard.replicated_state("exp_avg_sq_col", columns)
            update_factors(means, sums, kept, group["eps"][0], placement)
            update = divide_by_roots(placement, shard.grad, means)
        else:
            (own,) = yield [own]
            squares = shard.sharded_state("exp_avg_sq")
            squares.mul_(kept).add_(shard.grad.square().add_(group["eps"][0]), alpha=1 - kept)
            update = shard.grad * squares.rsqrt()
        (total,) = yield [sum_of_squares(update)]
        clip_rms(update, total, placement, group["clip_threshold"])
        rate = rate_of(group, shard.step) * scale_of(group, rms(own, placement))
        update.mul_(rate)
        if group["beta1"] is not None:
            moved = shard.sharded_state("exp_avg").mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
            update.copy_(moved)
        if group["weight_decay"]:
            update.add_(values * rate, alpha=group["weight_decay"])
        shard.subtract(update)


@final
class Adafactor(AdafactorBase):
    """Adafactor: the means of squares of a matrix are known by its rows and columns, and updates are limited.

    Tensors of more dimensions are stacks of matrices; of fewer, they have a second moment for each element.

    Args:
        params: Parameters, named parameters, or parameter groups; full, DTensors, or ranges under ZeRO.
        lr: The learning rate; None for `relative_step`.
        eps: Added to the squares of gradients; and the least scale of a parameter.
        clip_threshold: Upper limit of the root mean square of an update.
        decay_rate: The power of the number of the step that the means of squares move by.
        beta1: Decay rate of the mean of updates; None for no such mean.
        weight_decay: Decoupled weight decay, which is multiplied by the learning rate.
        scale_parameter: Multiply the learning rate by the root of the mean of the parameter's squares.
        relative_step: Take the learning rate from the number of the step.
        warmup_init: Let it begin small.

    Raises:
        ConfigError: An argument is out of its range, or contradicts another one.

    Communication: none for full parameters; else two all_reduces a step, the axes that shard them, of 4 bytes for each
    row and column, and of 8 for each parameter.

    Source: Shazeer, Stern, "Adafactor", 2018, https://arxiv.org/abs/1804.04235.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import Adafactor
        >>> weight = torch.nn.Parameter(torch.ones(3, 4))
        >>> optimizer = Adafactor([weight])
        >>> weight.grad = torch.ones(3, 4)
        >>> optimizer.step()
        >>> print(f"{weight[0, 0].item():.2f}", optimizer.state[weight]["exp_avg_sq_row"].shape)
        0.99 torch.Size([3])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        flags = switches(scale_parameter, relative_step, warmup_init)
        super().__init__(params, numbers(lr, eps, clip_threshold, decay_rate, beta1, weight_decay) | flags)


@final
class DistributedAdaFactor(SetupDistributedMixin, AdafactorBase):
    """`Adafactor` for shards that `setup_distributed` describes.

    Args:
        params: Parameters, named parameters, or parameter groups.
        lr: The learning rate; None for `relative_step`.
        eps: Added to the squares of gradients; and the least scale of a parameter.
        clip_threshold: Upper limit of the root mean square of an update.
        decay_rate: The power of the number of the step that the means of squares move by.
        beta1: Decay rate of the mean of updates; None for no such mean.
        weight_decay: Decoupled weight decay, which is multiplied by the learning rate.
        scale_parameter: Multiply the learning rate by the root of the mean of the parameter's squares.
        relative_step: Take the learning rate from the number of the step.
        warmup_init: Let it begin small.

    Raises:
        ConfigError: An argument is out of its range, or contradicts another one.

    Communication: two all_reduces a step, the axes that shard the parameters, of 4 bytes for each row and column, and
    of 8 for each parameter.

    Source: Shazeer, Stern, "Adafactor", 2018, https://arxiv.org/abs/1804.04235.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.optimizer import DistributedAdaFactor
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     mesh = ParallelMesh(dp=2)
        ...     weight = torch.nn.Parameter(torch.ones(2, 3))
        ...     mine = torch.nn.Parameter(torch.ones(3))
        ...     optimizer = DistributedAdaFactor([mine])
        ...     optimizer.setup_distributed(None, mesh.group("dp"), {mine: weight}, is_zero=True)
        ...     mine.grad = torch.ones(3)
        ...     optimizer.step()
        ...     return [round(value, 4) for value in mine.tolist()]
        >>> run_threads(program, 2)
        [[0.99, 0.99, 0.99], [0.99, 0.99, 0.99]]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        flags = switches(scale_parameter, relative_step, warmup_init)
        super().__init__(params, numbers(lr, eps, clip_threshold, decay_rate, beta1, weight_decay) | flags)


def numbers(
    lr: float | None,
    eps: tuple[float, float],
    clip_threshold: float,
    decay_rate: float,
    beta1: float | None,
    weight_decay: float,
) -> dict[str, Any]:
    """Return the defaults of groups that are numbers."""
    return {
        "lr": lr,
        "eps": eps,
        "clip_threshold": clip_threshold,
        "decay_rate": decay_rate,
        "beta1": beta1,
        "weight_decay": weight_decay,
    }


def switches(scale_parameter: bool, relative_step: bool, warmup_init: bool) -> dict[str, Any]:
    """Return the defaults of groups that are true or false."""
    return {"scale_parameter": scale_parameter, "relative_step": relative_step, "warmup_init": warmup_init}


def rate_of(group: dict[str, Any], step: int) -> float:
    """Return the learning rate of a step, before the scale of the parameter."""
    if not group["relative_step"]:
        return float(group["lr"])
    return min(_WARMUP_STEP * step if group["warmup_init"] else _LARGEST_STEP, step**-0.5)


def scale_of(group: dict[str, Any], own: torch.Tensor) -> torch.Tensor | float:
    """Return what the root mean square of a parameter multiplies its learning rate by."""
    return own.clamp(min=group["eps"][1]) if group["scale_parameter"] else 1.0
