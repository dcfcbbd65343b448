"""Parameters that several stages have: their values are one, and their gradient is the sum of all."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import NamedTuple, final
from weakref import ref

import torch
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.pipeline.p2p import P2PLink, make_links, peer_pairs, wait
from colossal._src.pipeline.schedule.stage_placement import SharedParameter, StagePlacement
from colossal._src.pipeline.stage import Stage


class _TiedParam(NamedTuple):
    """A parameter of this rank that others have too, and the ranks of the pp axis that have it, this one among them."""

    parameter: nn.Parameter
    ranks: tuple[int, ...]


@final
class TiedGradientReducer:
    """Sums up gradients of parameters that this rank and others have.

    The gradient of such a parameter is accumulated separately, so that it can be sent after the last micro-batch.
    The parameter itself gets the sum over all ranks as one more backward pass, added up in the same order everywhere,
    so that all of them have the same bits.
    """

    def __init__(
        self, stages: Mapping[int, Stage], placement: StagePlacement, links: Mapping[int, P2PLink], own: int
    ) -> None:
        self._found, self._links, self._own = list(_find(stages, placement)), links, own
        self._kept: dict[nn.Parameter, torch.Tensor] = {}
        self._is_exchanging = False
        for index, (parameter, _) in enumerate(self._found):
            if parameter.requires_grad:
                # weak, as a parameter holds its hooks, and this the parameters
                parameter.register_hook(partial(_keep, ref(self), index))

    def exchange(self, backward: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """Add what all ranks have made since the last time.

        Communication: the parameters' bytes, to each other rank that has them.
        """
        kept, self._kept = self._kept, {}
        for parameter, ranks in self._found:
            if parameter.requires_grad:
                # Zeros where this rank made no gradient: the other ranks wait for one all the same.
                parts = self._gather(kept.get(parameter, torch.zeros_like(parameter)), ranks)
                # The hook must let the sum pass, which it would otherwise keep for the next exchange.
                self._is_exchanging = True
                backward(parameter, reduce(torch.add, parts))
                self._is_exchanging = False

    def _gather(self, part: torch.Tensor, ranks: tuple[int, ...]) -> list[torch.Tensor]:
        """Exchange the gradients of one parameter, in the order of the ranks."""
        others = [rank for rank in ranks if rank != self._own]
        parts = {rank: _empty_like(part) for rank in others}
        works = [self._links[rank].post(each) for rank, each in parts.items()]
        for rank in others:  # after the receives were posted, as a send may wait until the other rank has done that
            self._links[rank].send(part)
        for work in works:
            wait(work)
        parts[self._own] = part
        return [parts[rank] for rank in ranks]

    def keep(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Keep a gradient for the exchange, and return what its parameter gets in its place; None for the same."""
        if self._is_exchanging:
            return None
        parameter = self._found[index].parameter
        self._kept[parameter] = self._kept[parameter] + grad if parameter in self._kept else grad.clone()
        # The exchanged sum contains this gradient: in `.grad` now, it would count twice.
        return torch.zeros_like(grad)


def _keep(reducer: ref[TiedGradientReducer], index: int, grad: torch.Tensor) -> torch.Tensor | None:
    own = reducer()
    return None if own is None else own.keep(index, grad)


def broadcast_tied_parameters(stages: Iterable[Stage], placement: StagePlacement, mesh: ParallelMesh) -> None:
    """Let a parameter that stages of several ranks have take the value that it has on the first of them.

    Communication: send, pp, the bytes of these parameters, to each other rank that has them; on an accelerator, links
    are opened first.
    """
    own, found = mesh.rank("pp"), {stage.index: stage for stage in stages}
    links = make_links(mesh, peer_pairs(placement, shared_parameters_of(found.values())))
    for parameter, (first, *others) in _find(found, placement):
        if first == own:
            for other in others:
                links[other].send(parameter)
                links[other].drain()
        else:
            wait(links[first].post(values := _empty_like(parameter)))
            parameter.data.copy_(values)


def shared_parameters_of(stages: Iterable[Stage]) -> list[SharedParameter]:
    """Find the parameters that stages have in common, in an order that is the same on all ranks."""
    found = {(each.stages, each.names): each for stage in stages for each in stage.shared}
    return [found[key] for key in sorted(found)]


def _find(stages: Mapping[int, Stage], placement: StagePlacement) -> Iterator[_TiedParam]:
    for shared in shared_parameters_of(stages.values()):
        here = [index for index in shared.stages if index in stages]
        ranks = shared.ranks(placement)
        if len(ranks) > 1 and here:
            # Stages of one rank have the same parameter object, so the first of them stands for all.
            yield _TiedParam(stages[here[0]].module.get_parameter(shared.names[shared.stages.index(here[0])]), ranks)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
