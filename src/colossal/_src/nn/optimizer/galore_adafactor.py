"""GaLore over Adafactor: means of squares by the rows and columns of a projected gradient."""

from typing import Any, final

from torch.optim.optimizer import ParamsT

from colossal._src.nn.optimizer.adafactor import AdafactorBase, numbers, rate_of, scale_of, switches
from colossal._src.nn.optimizer.factored import (
    SumRequests,
    clip_rms,
    divide_by_roots,
    factor_shapes,
    rms,
    row_and_column_sums,
    update_factors,
)
from colossal._src.nn.optimizer.galore import is_projected, projection_of, set_projection_defaults
from colossal._src.nn.optimizer.param_shard import ParamShard, sum_of_squares
from colossal._src.tensor import Placement


@final
class GaLoreAdafactor(AdafactorBase):
    """GaLore: Adafactor on the projections of gradients onto their leading singular vectors.

    Only matrices in groups with a ``rank`` are projected, as `get_galore_param_groups` makes them, and of these only
    those whose sides are longer; all else is updated as by `Adafactor`. The update is limited before it is projected
    back; the scale of a parameter is that of the full one.

    Args:
        params: Parameter groups; full, DTensors, or ranges under ZeRO.
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

    Communication: none for full parameters; else that of `Adafactor` for those that are not projected, and of
    `GaLoreAdamW` for those that are, with 4 bytes more for each.

    Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024,
    https://arxiv.org/abs/2403.03507; Shazeer, Stern, "Adafactor", 2018, https://arxiv.org/abs/1804.04235.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import GaLoreAdafactor, get_galore_param_groups
        >>> model = torch.nn.Linear(8, 6)
        >>> optimizer = GaLoreAdafactor(get_galore_param_groups(model, weight_decay=0.0, rank=2))
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["exp_avg_sq_row"].shape)
        (2,)
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
        super().__init__(
            params,
            numbers(lr, eps, clip_threshold, decay_rate, beta1, weight_decay)
            | switches(scale_parameter, relative_step, warmup_init),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: ``{"params": [...]}`` with the group's own hyperparameters; with a ``rank``, its matrices are
                projected.

        Raises:
            ConfigError: There is both a learning rate and one that the steps decide, or none; or ``proj_type`` is
                unknown.
        """
        set_projection_defaults(param_group)
        super().add_param_group(param_group)

    def _update_shard(self, shard: ParamShard) -> SumRequests:
        if not is_projected(shard):
            yield from super()._update_shard(shard)
            return
        group, placement, values = shard.group, shard.placement, shard.values
        projection = yield from projection_of(shard)
        low, own = yield [projection.project(placement, shard.grad), sum_of_squares(values)]
        whole = Placement.full(low.shape)  # all ranks have the projected gradient from here on
        rows, columns = factor_shapes(whole)
        means = shard.replicated_state("exp_avg_sq_row", rows), shard.replicated_state("exp_avg_sq_col", columns)
        kept = 1.0 - shard.step ** group["decay_rate"]
        update_factors(means, row_and_column_sums(whole, low), kept, group["eps"][0], whole)
        update = divide_by_roots(whole, low, means)
        clip_rms(update, sum_of_squares(update), whole, group["clip_threshold"])
        rate = rate_of(group, shard.step) * scale_of(group, rms(own, placement))
        update.mul_(rate)
        if group["beta1"] is not None:
            mean = shard.replicated_state("exp_avg", low.shape)
            update = mean.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        moved = projection.project_back(placement, update, shard.grad).mul_(group["scale"])
        shard.subtract(moved.add_(values * rate, alpha=group["weight_decay"]))
