"""Gradients of weights that are computed later than those of activations, by the older name."""

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, final

import torch

from colossal._src.legacy.notice import superseded
from colossal.errors import PlanError

_Accumulate = Callable[[torch.Tensor, torch.Tensor, Any], object]


class _Deferred(NamedTuple):
    total_input: torch.Tensor
    grad_output: torch.Tensor
    weight: torch.Tensor
    func: _Accumulate


@final
class WeightGradStore:
    """What the backward pass of micro-batches left to be computed, for two model chunks of this process.

    Superseded by `colossal.pipeline.WeightGrads`, which belongs to a pass instead of to the process.

    Attributes:
        cache: What `put` got since the last `flush`.
        weight_grad_queue: For each model chunk, what each `flush` closed, the oldest first.
    """

    cache: ClassVar[list[_Deferred]] = []
    weight_grad_queue: ClassVar[tuple[deque[list[_Deferred]], deque[list[_Deferred]]]] = (deque(), deque())

    @classmethod
    def put(cls, total_input: torch.Tensor, grad_output: torch.Tensor, weight: torch.Tensor, func: _Accumulate) -> None:
        """Keep what the gradient of a weight is computed from.

        Args:
            total_input: The input of the layer.
            grad_output: The gradient of its output.
            weight: The weight.
            func: Called later with the input, the gradient and ``weight.grad``, to which it adds.
        """
        superseded("colossal.pipeline.weight_grad_store.WeightGradStore", "colossal.pipeline.WeightGrads")
        cls.cache.append(_Deferred(total_input, grad_output, weight, func))

    @classmethod
    def flush(cls, chunk: int = 0) -> None:
        """Close what belongs to a micro-batch.

        Args:
            chunk: The model chunk, 0 or 1.
        """
        cls.weight_grad_queue[chunk].append([*cls.cache])
        cls.cache.clear()

    @classmethod
    def pop(cls, chunk: int = 0) -> None:
        """Compute the gradients of the oldest micro-batch that was closed.

        Args:
            chunk: The model chunk, 0 or 1.

        Raises:
            PlanError: There is none.
        """
        if not cls.weight_grad_queue[chunk]:
            raise PlanError(
                f"Gradients of weights are computed after flush(chunk={chunk}). Found none. Call flush once for each "
                "pop."
            )
        for total_input, grad_output, weight, func in cls.weight_grad_queue[chunk].popleft():
            func(total_input, grad_output, weight.grad)

    @classmethod
    def clear(cls, stage: int, chunk: int = 0) -> None:
        """Compute all that was closed.

        Args:
            stage: Not needed: a process has one store.
            chunk: The model chunk, 0 or 1.
        """
        del stage
        while cls.weight_grad_queue[chunk]:
            cls.pop(chunk)
