"""A loss or a gradient that is infinite or NaN stops training, instead of making all parameters so."""

import math
from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import distributed as dist

from colossal._src.comm import all_reduce_over, gather_objects
from colossal._src.tensor import grad_of, local_of
from colossal.errors import NonFiniteError

_SHOWN = 3


@final
class NonFiniteCheck:
    """Looks at the losses and gradients of a step, on all ranks together.

    Args:
        groups: The process groups over which ranks agree; each with several ranks.
        device: Where they communicate.

    Example:
        >>> import torch
        >>> from colossal.errors import NonFiniteError
        >>> from colossal.interface import NonFiniteCheck
        >>> check = NonFiniteCheck((), torch.device("cpu"))
        >>> check.record_loss(torch.tensor(float("nan")))
        >>> try:
        ...     check.check({})
        ... except NonFiniteError as error:
        ...     print(str(error).partition(".")[2].partition(".")[0])
         Found in step 0 on rank 0: the loss
    """

    def __init__(self, groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
        self._groups, self._device = tuple(groups), device
        self._losses: list[torch.Tensor] = []
        self._num_steps = 0

    def record_loss(self, loss: torch.Tensor) -> None:
        """Remember whether a loss is finite, without waiting for it.

        Args:
            loss: Any shape.
        """
        self._losses.append(loss.detach().isfinite().all())

    def clear(self) -> None:
        """Discard the losses of a step that is not taken."""
        self._losses.clear()

    def check(self, parameters: Mapping[torch.Tensor, str]) -> None:
        """Refuse the step if a loss or a gradient of any rank is not finite.

        Args:
            parameters: The parameters that are going to be updated, with their names.

        Raises:
            NonFiniteError: One is; on all ranks.

        Communication: all_reduce, all axes, 1 byte; if something is not finite, all_gather_object.
        """
        step, losses, self._losses = self._num_steps, self._losses, []
        self._num_steps += 1
        grads = [_values(grad) for grad in map(grad_of, parameters) if grad is not None]
        # The largest magnitude is finite if and only if all are; a sum of squares overflows earlier.
        norms = [torch.linalg.vector_norm(grad, math.inf) for grad in grads if grad.numel()]
        seen = [*(each.isfinite() for each in norms), *losses]
        # a rank that has seen neither losses nor gradients takes part in the reduction, too
        bad = (
            torch.stack([~each.to(self._device) for each in seen]).any()
            if seen
            else torch.zeros((), device=self._device)
        )
        if not all_reduce_over(bad.to(self._device, torch.uint8), self._groups, "max"):
            return
        found = ["the loss"] if not all(losses) else []
        found += [
            f"the gradient of {name}"
            for each, name in parameters.items()
            if (grad := grad_of(each)) is not None and not _values(grad).isfinite().all()
        ]
        rank = dist.get_rank() if dist.is_initialized() else 0
        places = gather_objects((rank, found), self._groups, "compares non-finite gradients")
        raise NonFiniteError(
            "A step needs a finite loss and finite gradients. Found in step "
            f"{step} {'; '.join(f'on rank {rank}: {_shortened(each)}' for rank, each in places if each)}. Nothing was "
            "updated. Look at the batch of this step and at the learning rate, clip gradients by max_norm, or leave "
            "refuse_nonfinite out to train on."
        )


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else local_of(grad)


def _shortened(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
