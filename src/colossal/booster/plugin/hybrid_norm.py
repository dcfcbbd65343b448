"""The norm of gradients of a model that is divided along several axes."""

import math
from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from colossal.amp import Masters
from colossal.cluster import ParallelMesh
from colossal.comm import all_reduce_over
from colossal.errors import UnsupportedError
from colossal.pipeline import Stage
from colossal.tensor import local_of


@final
class HybridNorm:
    """Measures the common norm of gradients, each element counted on one rank.

    A parameter that tp divides counts on all its ranks, and any other one on the first. One that two stages of a
    pipeline have counts on the first of them.

    Args:
        stages: The stages of this rank.
        mesh: The mesh.
        shares_over_dp: Whether each data-parallel rank has a part of every gradient.

    Attributes:
        masters: What the optimizer holds in place of parameters; None if it holds these.
    """

    def __init__(self, stages: Sequence[Stage], mesh: ParallelMesh, shares_over_dp: bool) -> None:
        axes = ("tp", "pp", "dp") if shares_over_dp else ("tp", "pp")
        self._groups = [mesh.group(axis) for axis in axes if mesh.size(axis) > 1]
        self._device = mesh.accelerator.get_current_device()
        divided = divided_parameters(stages)
        counts_all = mesh.rank("tp") == 0
        again = set(_counted_elsewhere(stages))
        self._counted = {
            parameter
            for stage in stages
            for parameter in stage.parameters()
            if (counts_all or parameter in divided) and parameter not in again
        }
        self.masters: Masters | None = None

    def __call__(self, parameters: Sequence[nn.Parameter], norm_type: float) -> torch.Tensor:
        """Measure.

        Args:
            parameters: Those of the optimizer that have a gradient.
            norm_type: The p of the p-norm.

        Returns:
            The norm; a scalar, the same on all ranks.

        Raises:
            UnsupportedError: `norm_type` is not greater than 0.

        Communication: all_reduce, tp, pp and with ZeRO dp, 8 bytes each.
        """
        if not norm_type > 0:
            raise UnsupportedError(
                f"The norm of divided gradients needs a norm_type greater than 0. Found norm_type={norm_type}. "
                "Pass 1.0, 2.0 or float('inf')."
            )
        working = {} if self.masters is None else self.masters.pairs
        grads = [
            local_of(parameter.grad)
            for parameter in parameters
            if parameter.grad is not None and working.get(parameter, parameter) in self._counted
        ]
        own = get_total_norm(grads, norm_type).to(self._device, torch.float64)
        if math.isinf(norm_type):
            norm = all_reduce_over(own, self._groups, "max")
        else:
            norm = all_reduce_over(own**norm_type, self._groups) ** (1 / norm_type)
        is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
        return norm if is_double else norm.to(torch.float32)


def divided_parameters(stages: Sequence[Stage]) -> Collection[nn.Parameter]:
    """Find the parameters of which tp ranks have different parts.

    Args:
        stages: The stages of this rank.

    Returns:
        The parameters.
    """
    return {
        module.get_parameter(name)
        for stage in stages
        for module in stage.modules()
        for name, layout in getattr(module, "layouts", {}).items()
        if any(layout.dims)
    }


def _counted_elsewhere(stages: Sequence[Stage]) -> list[nn.Parameter]:
    here = {stage.index: stage for stage in stages}
    return [
        stage.module.get_parameter(name)
        for stage in stages
        for shared in stage.shared
        for name, index in zip(shared.names, shared.stages, strict=True)
        if index == stage.index and shared.stages[0] not in here
    ]
