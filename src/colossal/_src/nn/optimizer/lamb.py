"""LAMB: Adam whose step is as large as the norm of each parameter says, for large batches."""

from abc import abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any, final

import torch
from torch.optim.optimizer import ParamsT

from colossal._src.nn.optimizer.checked_optimizer import reject_option
from colossal._src.nn.optimizer.factored import SumRequests, run_with_batched_sums
from colossal._src.nn.optimizer.param_shard import (
    ParamShard,
    SetupDistributedMixin,
    ShardAwareOptimizer,
    sum_of_squares,
)

_LARGEST_NORM = 10.0


@dataclass(frozen=True)
class _Rules:
    """Where the LAMBs differ."""

    adapts: bool  # whether the step depends on the norm of the parameter
    bias_correction: bool  # whether the means are corrected for having begun at zero
    largest_norm: float = inf  # the upper limit of the norm of a parameter
    # whether gradients are averaged, that is weighted by 1 - beta; if not, they are added in full
    averages_grads: bool = True
    is_decoupled: bool = True  # whether weight decay is added to the update; if not, to the gradient


class LambBase(ShardAwareOptimizer):
    """The algorithm of all LAMB optimizers."""

    @abstractmethod
    def _rules(self, group: dict[str, Any]) -> _Rules:
        """Return the rules of a group."""

    def _update_shard(self, shard: ParamShard) -> SumRequests:
        group, rules, values = shard.group, self._rules(shard.group), shard.values
        decay = group["weight_decay"]
        grad = shard.grad
        if not rules.is_decoupled and decay:
            grad = grad.add(values, alpha=decay)
        update = _adam_update(shard, grad, rules)
        if rules.is_decoupled and decay:
            update.add_(values, alpha=decay)
        ratio = 1.0
        if rules.adapts:
            (squares,) = yield [torch.stack([sum_of_squares(values), sum_of_squares(update)])]
            norms = squares.sqrt()
            own, moved = norms[0].clamp(max=rules.largest_norm), norms[1]
            # a parameter of zeros would otherwise never move
            ratio = torch.where((own > 0) & (moved > 0), own / moved, 1.0)
        shard.subtract(update.mul_(ratio * group["lr"]))


@final
class Lamb(LambBase):
    r"""LAMB: each parameter moves by a fraction of its own norm, whatever the size of its gradient.

    .. math::
        w \leftarrow w - \eta \frac{\min(\|w\|, 10)}{\|u\|} u, \qquad u = \frac{m}{\sqrt{v} + \epsilon} + \lambda w

    with the means :math:`m` of the gradients and :math:`v` of their squares; a norm of 0 gives the factor 1.

    Args:
        params: Parameters, named parameters, or parameter groups; full, DTensors, or ranges under ZeRO.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay: this multiple of the parameter is added to the update.
        adam: Leave the factor out, which makes it AdamW.
        bias_correction: Whether to correct the bias of the moments, which start at zero.

    Raises:
        ConfigError: An argument is out of its range.

    Communication: none for full parameters; else all_reduce, the axes that shard them, 8 bytes for each parameter in
    one call a step.

    Source: You et al., "Large Batch Optimization for Deep Learning", 2019, https://arxiv.org/abs/1904.00962.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import Lamb
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = Lamb([weight], lr=0.1, bias_correction=True)
        >>> weight.grad = torch.tensor([1000.0, 0.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([2.5000, 4.0000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        super().__init__(params, _defaults(lr, betas, eps, weight_decay, adam, bias_correction))

    def _rules(self, group: dict[str, Any]) -> _Rules:
        return _plain_rules(group)


@final
class DistributedLamb(SetupDistributedMixin, LambBase):
    """`Lamb` for shards that `setup_distributed` describes.

    Args:
        params: Parameters, named parameters, or parameter groups.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay: this multiple of the parameter is added to the update.
        bias_correction: Whether to correct the bias of the moments, which start at zero.
        adam: Leave the factor out, which makes it AdamW.

    Raises:
        ConfigError: An argument is out of its range.

    Communication: all_reduce, the axes that shard the parameters, 8 bytes for each parameter in one call a step.

    Source: You et al., "Large Batch Optimization for Deep Learning", 2019, https://arxiv.org/abs/1904.00962.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.optimizer import DistributedLamb
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     mesh = ParallelMesh(dp=2)
        ...     weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        ...     mine = torch.nn.Parameter(weight.detach()[mesh.rank("dp")].view(1))
        ...     optimizer = DistributedLamb([mine], lr=0.1, bias_correction=True)
        ...     optimizer.setup_distributed(None, mesh.group("dp"), {mine: weight}, is_zero=True)
        ...     mine.grad = torch.tensor([1000.0, 0.0])[mesh.rank("dp")].view(1)
        ...     optimizer.step()
        ...     return mine.tolist()
        >>> run_threads(program, 2)
        [[2.5], [4.0]]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        bias_correction: bool = False,
        adam: bool = False,
    ) -> None:
        super().__init__(params, _defaults(lr, betas, eps, weight_decay, adam, bias_correction))

    def _rules(self, group: dict[str, Any]) -> _Rules:
        return _plain_rules(group)


@final
class FusedLAMB(LambBase):
    """LAMB that first limits the common norm of all gradients, and leaves parameters without weight decay to Adam.

    Args:
        params: Parameters, named parameters, or parameter groups; full, DTensors, or ranges under ZeRO.
        lr: The learning rate.
        bias_correction: Whether to correct the bias of the moments, which start at zero.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay: this multiple of the parameter is added to the update, or to the gradient.
        amsgrad: Not built.
        adam_w_mode: The former; if not the latter.
        grad_averaging: Whether the gradient counts by ``1 - betas[0]`` in its mean; if not, in full.
        set_grad_none: Whether `zero_grad` frees the gradients rather than fill them with zeros.
        max_grad_norm: What the common norm of all gradients is limited to; 0 for no limit.
        use_nvlamb: Have the step depend on the norm of parameters without weight decay, too.

    Raises:
        ConfigError: An argument is out of its range.
        UnsupportedError: `amsgrad` is set.

    Communication: none for full parameters; else two all_reduces a step, the axes that shard them, of 4 and of 8 bytes
    for each parameter.

    Source: You et al., "Large Batch Optimization for Deep Learning", 2019, https://arxiv.org/abs/1904.00962.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import FusedLAMB
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = FusedLAMB([weight], lr=0.1, weight_decay=0.0, use_nvlamb=True)
        >>> weight.grad = torch.tensor([1000.0, 0.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([2.5000, 4.0000])
    """

    set_grad_none = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            reject_option("amsgrad", amsgrad, "Leave it out.")
        options = {
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, _defaults(lr, betas, eps, weight_decay, False, bias_correction) | options)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Throw the gradients away.

        Args:
            set_to_none: Free them rather than fill them with zeros; by default as passed to the constructor.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _update_shards(self, shards: list[ParamShard]) -> None:
        limits = [shard.group["max_grad_norm"] or inf for shard in shards]
        squares: list[torch.Tensor] = []
        if min(limits, default=inf) < inf:
            run_with_batched_sums((shard.placement, _collect(shard, squares)) for shard in shards)
            norm = torch.stack([square.double() for square in squares]).sum().sqrt()
            for shard, limit in zip(shards, limits, strict=True):
                shard.grad = shard.grad * (limit / norm).clamp(max=1.0)
        super()._update_shards(shards)

    def _rules(self, group: dict[str, Any]) -> _Rules:
        return _Rules(
            adapts=group["use_nvlamb"] or group["weight_decay"] != 0,
            bias_correction=group["bias_correction"],
            averages_grads=group["grad_averaging"],
            is_decoupled=group["adam_w_mode"],
        )


def _collect(shard: ParamShard, squares: list[torch.Tensor]) -> SumRequests:
    (total,) = yield [sum_of_squares(shard.grad)]
    squares.append(total)


def _plain_rules(group: dict[str, Any]) -> _Rules:
    return _Rules(adapts=not group["adam"], bias_correction=group["bias_correction"], largest_norm=_LARGEST_NORM)


def _defaults(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, adam: bool, bias_correction: bool
) -> dict[str, Any]:
    return {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "adam": adam,
        "bias_correction": bias_correction,
    }


def _adam_update(shard: ParamShard, grad: torch.Tensor, rules: _Rules) -> torch.Tensor:
    """Bring the means up to date, and return the update that Adam would make, before the learning rate."""
    beta1, beta2 = shard.group["betas"]
    first, second = shard.sharded_state("exp_avg"), shard.sharded_state("exp_avg_sq")
    first.mul_(beta1).add_(grad, alpha=1 - beta1 if rules.averages_grads else 1.0)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    of_first, of_second = (1 - beta1**shard.step, 1 - beta2**shard.step) if rules.bias_correction else (1.0, 1.0)
    return (first / of_first).div_((second / of_second).sqrt_().add_(shard.group["eps"]))
