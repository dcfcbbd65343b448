"""The boosted model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from colossal.errors import ConfigError

_FRAMES = 6
"""As far down the stack is looked: a function of torch, its list, and the generators of a module."""


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
        self._has_whole_grads = True

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

    def guard_gradients(self) -> None:
        """Refuse functions of torch that clip gradients, which would see a part of them: the optimizer's do it."""
        self._has_whole_grads = False

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters, as `torch.nn.Module.named_parameters` and `parameters` do.

        Args:
            prefix: What names begin with.
            recurse: Those of submodules too.
            remove_duplicate: Name each parameter once.

        Yields:
            Names and parameters.

        Raises:
            ConfigError: `torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.clip_grad_value_` asks, and the gradients
                are not in the parameters, or some are on other ranks.
        """
        if not self._has_whole_grads and _is_clipping():
            raise ConfigError(
                "Gradients that several ranks have parts of, or that are in float32 copies, are clipped by the boosted "
                "optimizer. Found a call of torch.nn.utils.clip_grad_norm_ or clip_grad_value_ on the boosted model, "
                "which would clip a part of them by another norm on each rank, or none. Call "
                "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(value), or pass max_norm to the "
                "Booster."
            )
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

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


def _is_clipping() -> bool:
    """Whether one of torch's functions that clip gradients goes through parameters, directly or in a list."""
    frame = sys._getframe()  # noqa: SLF001 (the only way to see who asks)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == clip_grad.__file__:
            return True
        frame = frame.f_back
    return False


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
