"""Gradients of parameters that see only this rank's tokens, summed by a program that shards sequences itself."""

from collections.abc import Sequence
from typing import final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.comm import all_reduce_over
from colossal._src.legacy.notice import superseded
from colossal.errors import ConfigError

_MARK = "partial_derived"


@final
class SeqParallelUtils:
    """Marks parameters whose gradients are partial sums over tokens, and sums these.

    Superseded by `HybridParallelPlugin`, which sums the gradients of what computes with shards of sequences, and marks
    nothing.

    Example:
        >>> import torch
        >>> from colossal.shardformer.layer.utils import SeqParallelUtils
        >>> norm = torch.nn.LayerNorm(2)
        >>> SeqParallelUtils.marked_as_sp_partial_derived_param(norm.weight)
        >>> [SeqParallelUtils.is_sp_partial_derived_param(each) for each in norm.parameters()]
        [True, False]
    """

    @staticmethod
    def marked_as_sp_partial_derived_param(param: torch.Tensor) -> None:
        """Remember that the gradient of a parameter is that of this rank's tokens.

        Args:
            param: The parameter.
        """
        superseded("SeqParallelUtils", "HybridParallelPlugin(enable_sequence_parallelism=True)")
        setattr(param, _MARK, True)

    @staticmethod
    def is_sp_partial_derived_param(param: torch.Tensor) -> bool:
        """Return whether it is marked so.

        Args:
            param: The parameter.

        Returns:
            True if it is.
        """
        return getattr(param, _MARK, False)

    @staticmethod
    @torch.no_grad()
    def allreduce_partial_data_grad(
        process_group: dist.ProcessGroup | None,
        model: nn.Module | None = None,
        grads: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Sum gradients over the ranks that have other tokens, in place.

        Args:
            process_group: The ranks; nothing is summed without any.
            model: Its marked parameters' gradients are summed.
            grads: These are.

        Raises:
            ConfigError: Both `model` and `grads` are given, or neither.

        Communication: all_reduce, the group, the bytes of each gradient.
        """
        if (model is None) == (grads is None):
            raise ConfigError(
                "The gradients of a model or a list of them are summed. Found "
                f"{'neither' if model is None else 'both'}. Pass model=... or grads=..."
            )
        if model is not None:
            marked = filter(SeqParallelUtils.is_sp_partial_derived_param, model.parameters())
            grads = [each.grad for each in marked if each.grad is not None]
        if process_group is not None:
            for grad in grads or ():
                grad.copy_(all_reduce_over(grad, [process_group]))
