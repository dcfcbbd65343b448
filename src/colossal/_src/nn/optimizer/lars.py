"""LARS: stochastic gradient descent whose rate follows the norm of each parameter, for large batches."""

from typing import final

import torch
from torch.optim.optimizer import ParamsT

from colossal._src.nn.optimizer.factored import SumRequests
from colossal._src.nn.optimizer.param_shard import ParamShard, ShardAwareOptimizer, sum_of_squares


@final
class Lars(ShardAwareOptimizer):
    r"""LARS: momentum with a learning rate for each parameter, by the norms of it and of its gradient.

    .. math::
        v \leftarrow \mu v + \eta \frac{\gamma \|w\|}{\|g\| + \lambda \|w\| + \epsilon} (g + \lambda w), \qquad
        w \leftarrow w - v

    A norm of 0 gives the factor 1.

    Args:
        params: Parameters, named parameters, or parameter groups; full, DTensors, or ranges under ZeRO.
        lr: The learning rate :math:`\eta`.
        momentum: The momentum factor :math:`\mu`.
        eeta: The trust coefficient :math:`\gamma`.
        weight_decay: Weight decay :math:`\lambda`: this multiple of the parameter is added to the gradient.
        epsilon: Added to the divisor.

    Raises:
        ConfigError: An argument is out of its range.

    Communication: none for full parameters; else all_reduce, the axes that shard them, 8 bytes for each parameter in
    one call a step.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017,
    https://arxiv.org/abs/1708.03888.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import Lars
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = Lars([weight], lr=1.0, eeta=0.1)
        >>> weight.grad = torch.tensor([1000.0, 0.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([2.5000, 4.0000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "eeta": eeta, "weight_decay": weight_decay, "epsilon": epsilon}
        super().__init__(params, numbers)

    def _update_shard(self, shard: ParamShard) -> SumRequests:
        group, values = shard.group, shard.values
        (squares,) = yield [torch.stack([sum_of_squares(values), sum_of_squares(shard.grad)])]
        own, slope = squares.sqrt()
        ratio = group["eeta"] * own / (slope + group["weight_decay"] * own + group["epsilon"])
        # a parameter of zeros would otherwise never move
        rate = group["lr"] * torch.where((own > 0) & (slope > 0), ratio, 1.0)
        update = shard.grad.add(values, alpha=group["weight_decay"]).mul_(rate)
        if group["momentum"]:
            update = shard.sharded_state("momentum_buffer").mul_(group["momentum"]).add_(update)
        shard.subtract(update)
