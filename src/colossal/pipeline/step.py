"""The passes of one rank through its stages, of one batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch

from colossal.errors import ConfigError, ShapeError
from colossal.interface import OptimizerWrapper
from colossal.pipeline.lane import Description, Inbox, Link, pack
from colossal.pipeline.microbatch import join, map_tensors
from colossal.pipeline.placement import StagePlacement
from colossal.pipeline.schedule import Action, Message
from colossal.pipeline.stage import Stage
from colossal.pipeline.weight_grads import WeightGrads

Tensors = tuple[torch.Tensor, ...]


@final
class Step:
    """What is under way between the forward and the backward passes of one batch."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        batches: Sequence[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        links: Mapping[int, Link],
        inboxes: Mapping[int, Inbox],
        known: dict[int, tuple[Description, ...]],
        placement: StagePlacement,
        defers: bool,
        keeps_outputs: bool,
    ) -> None:
        self.loss: torch.Tensor | None = None
        self._stages, self._batches, self._criterion, self._optimizer = stages, batches, criterion, optimizer
        self._links, self._inboxes, self._known, self._placement = links, inboxes, known, placement
        self._entered: dict[tuple[int, int], Tensors] = {}
        self._left: dict[tuple[int, int], Tensors] = {}
        self._here: dict[Message, Tensors] = {}
        self._later: dict[tuple[int, int], WeightGrads] = {}
        self._outputs: list[Any] | None = [] if keeps_outputs else None
        self._defers, self._waited = defers, 0.0

    def do(self, action: Action) -> float:
        """Do one thing."""
        self._waited = 0.0
        kind, stage, microbatch = action
        if kind == "F":
            self._forward(self._stages[stage], microbatch)
        elif kind == "W":
            assert self._optimizer is not None
            self._later.pop((stage, microbatch)).accumulate(self._optimizer.backward_by_grad)
        else:
            self._backward(self._stages[stage], microbatch)
        return self._waited

    def join_outputs(self) -> Any:
        """Put the outputs of all micro-batches together."""
        return join(self._outputs) if self._outputs else None

    def _forward(self, stage: Stage, microbatch: int) -> None:
        place, batch = (stage.index, microbatch), self._batches[microbatch]
        entered = () if stage.is_first else self._take(Message(False, stage.index - 1, microbatch))
        if self._optimizer is not None:
            for tensor, known in zip(entered, self._known.get(stage.index - 1, ()), strict=True):
                tensor.requires_grad_(known.requires_grad)
        later = WeightGrads()
        with later.defer() if self._defers else nullcontext():
            outputs = stage(None if stage.is_first else entered[0] if len(entered) == 1 else entered, batch)
        if stage.is_last:
            left: Tensors = (self._take_loss(outputs, batch),)
        else:
            left = outputs if isinstance(outputs, tuple) else (outputs,)
            self._give(Message(False, stage.index, microbatch), self._checked(stage.index, left))
        if self._optimizer is not None:
            self._entered[place], self._left[place] = entered, left
        if self._defers:
            self._later[place] = later

    def _take_loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        if self._outputs is not None:
            self._outputs.append(map_tensors(outputs, torch.Tensor.detach))
        loss = self._criterion(outputs, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                "The criterion takes outputs and inputs of a micro-batch and returns its loss, one number in a tensor. "
                f"Found {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}. Take the mean."
            )
        loss = loss.reshape(()) / len(self._batches)
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        return loss

    def _backward(self, stage: Stage, microbatch: int) -> None:
        assert self._optimizer is not None
        place = (stage.index, microbatch)
        entered, left = self._entered.pop(place), self._left.pop(place)
        if stage.is_last:
            self._optimizer.backward(left[0])
        else:
            left = tuple(tensor for tensor in left if tensor.requires_grad)
            grads = self._take(Message(True, stage.index, microbatch))
            if left:
                self._optimizer.backward_by_grad(left, grads)
        if not stage.is_first:
            grads = tuple(
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in entered
                if tensor.requires_grad
            )
            self._give(Message(True, stage.index - 1, microbatch), grads)

    def _checked(self, stage: int, tensors: Tensors) -> Tensors:
        """Let the next stage know what it gets, and see that all micro-batches are alike."""
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ShapeError(
                f"A stage hands a tensor to the next one, or a tuple of them. Found that stage {stage} returned "
                f"{[type(tensor).__name__ for tensor in tensors]}. Cut the model at another place."
            )
        found = tuple(map(Description.of, tensors))
        target = self._placement.rank_of(stage + 1)
        if stage not in self._known:
            self._known[stage] = found
            if target in self._links:
                link = self._links[target]
                link.send(pack(found).to(link.device))
        elif self._known[stage] != found:
            raise ShapeError(
                f"All micro-batches leave a stage in the same shape. Found {found} after {self._known[stage]} at the "
                f"end of stage {stage}. Pad samples to one length."
            )
        return tensors

    def _give(self, message: Message, tensors: Tensors) -> None:
        target = self._placement.rank_of(message.stage if message.is_grad else message.stage + 1)
        if target not in self._links:
            self._here[message] = tuple(tensor.detach() for tensor in tensors)
            return
        for tensor in tensors:
            self._links[target].send(tensor)

    def _take(self, message: Message) -> Tensors:
        source = self._placement.rank_of(message.stage + 1 if message.is_grad else message.stage)
        if source not in self._links:
            return self._here.pop(message)
        begin = time.time()
        tensors = tuple(self._inboxes[source].take(message))
        self._waited = time.time() - begin
        return tensors
