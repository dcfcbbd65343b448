"""The boosted model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossal.interface.adapters import base_model_of


@final
class ModelWrapper(nn.Module):
    """A model whose forward pass runs inside a context, such as autocast, and that can be unwrapped.

    Args:
        module: The model, or a parallel wrapper around it.
        forward_context: Called before each forward pass; returns the context manager that the pass runs in.

    Example:
        >>> import torch
        >>> from colossal.interface import ModelWrapper
        >>> linear = torch.nn.Linear(4, 2)
        >>> ModelWrapper(linear).unwrap() is linear
        True
    """

    def __init__(
        self, module: nn.Module, forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        super().__init__()
        self.module = module
        self._forward_context = forward_context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward pass inside the context.

        Args:
            *args: Positional inputs of the wrapped module, of the shapes that it takes.
            **kwargs: Keyword inputs of the wrapped module.

        Returns:
            What the wrapped module returns.
        """
        with self._forward_context():
            return self.module(*args, **kwargs)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the user's own model, with the parameter names that it was built with.

        Args:
            unwrap_peft: Of a model with adapters, return the base model that they stand in; otherwise the
                `peft.PeftModel` that `boost` was given, which can merge them: ``merge_and_unload()``.

        Returns:
            The innermost module: not a wrapper such as `ModelWrapper` and `DistributedDataParallel`.
        """
        module = innermost(self.module)
        return base_model_of(module) if unwrap_peft else module


def innermost(module: nn.Module) -> nn.Module:
    """Take all wrappers off a model.

    Args:
        module: A model, maybe in a `ModelWrapper`, a `DistributedDataParallel`, or another wrapper that says so by a
            true attribute ``is_wrapper``.

    Returns:
        What is inside.

    Example:
        >>> import torch
        >>> from colossal.interface import ModelWrapper, innermost
        >>> innermost(ModelWrapper(torch.nn.Linear(4, 2)))
        Linear(in_features=4, out_features=2, bias=True)
    """
    found: Any = module
    while isinstance(found, ModelWrapper | DistributedDataParallel) or getattr(found, "is_wrapper", False):
        found = found.module
    return found

