"""Parameters that several stages have: their gradient is the sum of all."""

from collections.abc import Mapping

import torch

from colossal.pipeline.lane import Link, wait
from colossal.pipeline.placement import Placement
from colossal.pipeline.stage import Stage


def sum_shared(stages: Mapping[int, Stage], placement: Placement, links: Mapping[int, Link], own: int) -> None:
    """Add up the gradients of parameters that several ranks have, in the order of the ranks.

    Args:
        stages: The stages of this rank; those of one rank have one parameter in common, whose gradient is one.
        placement: Which rank has which stage.
        links: To the other ranks.
        own: This rank's place on the pp axis.

    Communication: per parameter, its bytes to each other rank that has it.
    """
    for stage in stages.values():
        for shared in stage.shared:
            here = [index for index in shared.stages if index in stages]
            others = sorted({placement.rank_of(index) for index in shared.stages} - {own})
            if others and here and here[0] == stage.index:
                parameter = stage.module.get_parameter(shared.names[shared.stages.index(stage.index)])
                if parameter.requires_grad:
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = _sum_over(grad, {rank: links[rank] for rank in others}, own)


def _sum_over(grad: torch.Tensor, links: Mapping[int, Link], own: int) -> torch.Tensor:
    parts = {own: grad, **{rank: torch.empty_like(grad) for rank in links}}
    for rank, link in links.items():
        link.send(grad)
        wait(link.post(parts[rank]))
        link.drain()
    first, *rest = (parts[rank] for rank in sorted(parts))
    total = first.clone()
    for part in rest:
        total += part
    return total
