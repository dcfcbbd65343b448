"""The passes of one rank through its stages, of one batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch

from colossal._src.interface import OptimizerWrapper
from colossal._src.pipeline.microbatch import map_tensors, merge_outputs
from colossal._src.pipeline.p2p import P2PLink, RecvQueue, TensorMeta, encode_metas
from colossal._src.pipeline.schedule import Action, P2PMessage
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
from colossal._src.pipeline.stage import Stage
from colossal._src.pipeline.weight_grads import WeightGrads
from colossal.errors import ConfigError, ShapeError

Tensors = tuple[torch.Tensor, ...]


@final
class PipelineStep:
    """The state between the forward and the backward passes of one batch."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        batches: Sequence[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        links: Mapping[int, P2PLink],
        recv_queues: Mapping[int, RecvQueue],
        known: dict[int, tuple[TensorMeta, ...]],
        placement: StagePlacement,
        defer_weight_grads: bool,
        return_outputs: bool,
    ) -> None:
        self.loss: torch.Tensor | None = None
        self._stages, self._batches, self._criterion, self._optimizer = stages, batches, criterion, optimizer
        self._links, self._recv_queues, self._known, self._placement = links, recv_queues, known, placement
        self._stage_inputs: dict[tuple[int, int], Tensors] = {}
        self._stage_outputs: dict[tuple[int, int], Tensors] = {}
        self._local_messages: dict[P2PMessage, Tensors] = {}
        self._weight_grads: dict[tuple[int, int], WeightGrads] = {}
        self._outputs: dict[int, Any] | None = {} if return_outputs else None
        self._defer_weight_grads, self._waited = defer_weight_grads, 0.0

    def do(self, action: Action) -> float:
        """Do one thing."""
        self._waited = 0.0
        kind, stage, microbatch = action
        if kind == "F":
            self._forward(self._stages[stage], microbatch)
        elif kind == "W":
            assert self._optimizer is not None
            self._weight_grads.pop((stage, microbatch)).accumulate(self._optimizer.backward_by_grad)
        else:
            self._backward(self._stages[stage], microbatch)
        return self._waited

    def join_outputs(self) -> Any:
        """Put the outputs of all micro-batches together."""
        # A given order may take micro-batches in another one than that of the batch.
        return merge_outputs([output for _, output in sorted(self._outputs.items())]) if self._outputs else None

    def _forward(self, stage: Stage, microbatch: int) -> None:
        key, batch = (stage.index, microbatch), self._batches[microbatch]
        inputs = () if stage.is_first else self._recv(P2PMessage(False, stage.index - 1, microbatch))
        if self._optimizer is not None:
            for tensor, known in zip(inputs, self._known.get(stage.index - 1, ()), strict=True):
                # What was received is a leaf, whose `.grad` is what goes back.
                tensor.requires_grad_(known.requires_grad)
        later = WeightGrads()
        with later.defer() if self._defer_weight_grads else nullcontext():
            outputs = stage(None if stage.is_first else inputs[0] if len(inputs) == 1 else inputs, batch)
        if stage.is_last:
            left: Tensors = (self._compute_loss(outputs, microbatch),)
        else:
            left = outputs if isinstance(outputs, tuple) else (outputs,)
            self._send(P2PMessage(False, stage.index, microbatch), self._send_metas(stage.index, left))
        if self._optimizer is not None:
            self._stage_inputs[key], self._stage_outputs[key] = inputs, left
        if self._defer_weight_grads:
            self._weight_grads[key] = later

    def _compute_loss(self, outputs: Any, microbatch: int) -> torch.Tensor:
        if self._outputs is not None:
            self._outputs[microbatch] = map_tensors(outputs, torch.Tensor.detach)
        loss = self._criterion(outputs, self._batches[microbatch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                "The criterion takes outputs and inputs of a micro-batch and returns its loss, one number in a tensor. "
                f"Found {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}. Take the mean."
            )
        # Gradients of all micro-batches add up; their sum is to be that of the mean.
        loss = loss.reshape(()) / len(self._batches)
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        return loss

    def _backward(self, stage: Stage, microbatch: int) -> None:
        assert self._optimizer is not None
        key = (stage.index, microbatch)
        # Removed, so that activations are freed with the graph after this pass.
        inputs, left = self._stage_inputs.pop(key), self._stage_outputs.pop(key)
        if stage.is_last:
            self._optimizer.backward(left[0])
        else:
            left = tuple(tensor for tensor in left if tensor.requires_grad)
            # Received even if it has no tensors, as messages are taken in the order in which they are sent.
            grads = self._recv(P2PMessage(True, stage.index, microbatch))
            if left:
                self._optimizer.backward_by_grad(left, grads)
        if not stage.is_first:
            grads = tuple(
                # The rank before has posted a receive for each of them, also for what this stage did not use.
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in inputs
                if tensor.requires_grad
            )
            self._send(P2PMessage(True, stage.index - 1, microbatch), grads)

    def _send_metas(self, stage: int, tensors: Tensors) -> Tensors:
        """Send the shapes to the next stage, and check that all micro-batches have the same."""
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ShapeError(
                f"A stage sends a tensor to the next one, or a tuple of them. Found that stage {stage} returned "
                f"{[type(tensor).__name__ for tensor in tensors]}. Split the model between other layers."
            )
        found = tuple(map(TensorMeta.of, tensors))
        target = self._placement.rank_of(stage + 1)
        # The next rank learns the shapes by the same header, so both ends agree on when there is none.
        if stage not in self._known:
            self._known[stage] = found
            if target in self._links:
                link = self._links[target]
                link.send(encode_metas(found).to(link.device))
        elif [each.requires_grad for each in self._known[stage]] != [each.requires_grad for each in found]:
            raise ShapeError(
                "What leaves a stage has gradients in all micro-batches or in none, as its ranks agree on messages. "
                f"Found that at the end of stage {stage} it has some in one micro-batch and none in another. Where a "
                "branch ends the graph, by detach or torch.no_grad(), multiply what trains by 0 and add it."
            )
        elif self._known[stage] != found:
            raise ShapeError(
                f"All micro-batches leave a stage in the same shape. Found {found} after {self._known[stage]} at the "
                f"end of stage {stage}. Pad samples to one length."
            )
        return tensors

    def _send(self, message: P2PMessage, tensors: Tensors) -> None:
        target = self._placement.rank_of(message.stage if message.is_grad else message.stage + 1)
        if target not in self._links:
            # Detached as if it were sent: a backward pass of this stage must end at its inputs.
            self._local_messages[message] = tuple(tensor.detach() for tensor in tensors)
            return
        for tensor in tensors:
            self._links[target].send(tensor)

    def _recv(self, message: P2PMessage) -> Tensors:
        source = self._placement.rank_of(message.stage + 1 if message.is_grad else message.stage)
        if source not in self._links:
            return self._local_messages.pop(message)
        begin = time.time()
        tensors = tuple(self._recv_queues[source].take(message))
        self._waited = time.time() - begin
        return tensors
