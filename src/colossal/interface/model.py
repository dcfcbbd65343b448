"""The boosted model."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
                `peft.PeftModel` that `boost` was given, which can merge them: ``merge_and_unload()``. Checkpoints
                of such a model carry the names of the `peft.PeftModel`.

        Returns:
            The innermost module: not a wrapper such as `ModelWrapper` and `DistributedDataParallel`.
        """
        module: Any = innermost(self.module)
        return module.get_base_model() if unwrap_peft and is_peft_model(module) else module


def innermost(module: nn.Module) -> nn.Module:
    """Take all wrappers off a model.

    Args:
        module: A model, maybe in a `ModelWrapper` or a `DistributedDataParallel`.

    Returns:
        What is inside.

    Example:
        >>> import torch
        >>> from colossal.interface import ModelWrapper, innermost
        >>> innermost(ModelWrapper(torch.nn.Linear(4, 2)))
        Linear(in_features=4, out_features=2, bias=True)
    """
    found: Any = module
    while isinstance(found, ModelWrapper | DistributedDataParallel):
        found = found.module
    return found


def is_peft_model(module: nn.Module) -> bool:
    """Tell whether a module is a `peft.PeftModel`, without importing peft: where it is not loaded, nothing is one.

    Args:
        module: Any module.

    Returns:
        Whether adapters of peft stand in it.

    Example:
        >>> import torch
        >>> from colossal.interface import is_peft_model
        >>> is_peft_model(torch.nn.Linear(4, 2))
        False
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)
