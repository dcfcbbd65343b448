"""A module that computes its forward pass again in the backward pass."""

from typing import Any, Self

from torch import nn

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.utils.activation_checkpoint import checkpoint


class CheckpointModule(nn.Module):
    """A module whose activations are not stored while it trains: subclasses write `_forward` in place of `forward`.

    Args:
        checkpoint: Compute the forward pass again in the backward pass; False for a plain module.
        offload: Keep the inputs in host memory until then.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn import CheckpointModule
        >>> class Square(CheckpointModule):
        ...     def _forward(self, x):
        ...         return x * x
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> Square()(x).backward()
        >>> x.grad
        tensor([6.])

    Attributes:
        checkpoint: Whether the forward pass is computed again in training mode.
    """

    def __init__(self, checkpoint: bool = True, offload: bool = False) -> None:
        super().__init__()
        superseded("colossal.nn.CheckpointModule", "torch.utils.checkpoint, or model.activation_checkpointing_enable()")
        self.checkpoint = self._use_checkpoint = checkpoint
        self._offload = offload

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs: what a subclass writes."""
        raise NotImplementedError(f"{type(self).__name__} is a CheckpointModule and writes _forward. Found none.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs, with activations stored or not.

        Args:
            *args: Of `_forward`.
            **kwargs: Of `_forward`.

        Returns:
            What `_forward` returns.
        """
        if not self._use_checkpoint:
            return self._forward(*args, **kwargs)
        return checkpoint(lambda *inputs: self._forward(*inputs, **kwargs), self._offload, *args)

    def train(self, mode: bool = True) -> Self:
        """Change the mode; in evaluation mode nothing is computed again.

        Args:
            mode: True for training.

        Returns:
            The module.
        """
        self._use_checkpoint = self.checkpoint and mode
        return super().train(mode)
