"""Parameters that two stages have: their values are one, and their gradient is the sum of both."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import final

import torch
from torch import nn

from colossal.errors import UnsupportedError
from colossal.pipeline.lane import Link, wait
from colossal.pipeline.placement import Placement
from colossal.pipeline.stage import Stage


@final
class SharedGrads:
    """Sums up gradients of parameters that this rank and another one have.

    What a backward pass adds to such a parameter is kept besides, so that it can be sent after the last micro-batch,
    whatever has become of the gradient until then; what comes from the other rank is one more backward pass.

    Args:
        stages: The stages of this rank; those of one rank have one parameter in common, whose gradient is one.
        placement: Which rank has which stage.
        links: To the other ranks.
        own: This rank's place on the pp axis.

    Raises:
        UnsupportedError: More than two ranks have a parameter.
    """

    def __init__(self, stages: Mapping[int, Stage], placement: Placement, links: Mapping[int, Link], own: int) -> None:
        self._found = [(parameter, links[other], own < other) for parameter, other in _find(stages, placement, own)]
        self._kept: dict[nn.Parameter, torch.Tensor] = {}
        self._is_exchanging = False
        for parameter, _, _ in self._found:
            if parameter.requires_grad:
                parameter.register_hook(partial(self._keep, parameter))

    def share_values(self) -> None:
        """Take over the values of the rank that has the earlier stage.

        Communication: the parameters' bytes, to one other rank.
        """
        for parameter, link, is_first in self._found:
            if is_first:
                link.send(parameter)
                link.drain()
            else:
                wait(link.post(values := torch.empty_like(parameter)))
                parameter.data.copy_(values)

    def exchange(self, backward: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """Add what the other rank has added since the last time.

        Args:
            backward: Takes a parameter and a gradient that is to be added.

        Communication: the parameters' bytes, to one other rank.
        """
        kept, self._kept = self._kept, {}
        for parameter, link, _ in self._found:
            if parameter.requires_grad:
                link.send(kept.get(parameter, torch.zeros_like(parameter)))
                wait(link.post(other := torch.empty_like(parameter)))
                self._is_exchanging = True
                backward(parameter, other)
                self._is_exchanging = False

    def _keep(self, parameter: nn.Parameter, grad: torch.Tensor) -> None:
        if not self._is_exchanging:
            self._kept[parameter] = self._kept[parameter] + grad if parameter in self._kept else grad.clone()


def _find(stages: Mapping[int, Stage], placement: Placement, own: int) -> Iterator[tuple[nn.Parameter, int]]:
    for stage in stages.values():
        for shared in stage.shared:
            here = [index for index in shared.stages if index in stages]
            others = sorted({placement.rank_of(index) for index in shared.stages} - {own})
            if len(others) > 1:
                raise UnsupportedError(
                    "A parameter belongs to stages of at most two ranks. Found "
                    f"{', '.join(shared.names)} on the stages {shared.stages}. Cut the model so that they meet, or "
                    "give each its own parameter."
                )
            if others and here and here[0] == stage.index:
                yield stage.module.get_parameter(shared.names[shared.stages.index(stage.index)]), others[0]
