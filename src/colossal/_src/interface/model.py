"""The boosted model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from colossal._src.interface.adapter_names import model_without_adapters
from colossal._src.interface.full_spec import full_spec_of
from colossal.errors import ConfigError

_FRAMES = 6
"""As far down the stack is looked: a function of torch, its list, and the generators of a module."""


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
        self._has_full_grads = True
        from colossal._src.interface.full_state_dict import refuse_partial_export

        refuse_partial_export(unwrap_model(module))

    def __getattr__(self, name: str) -> Any:
        """Find a parameter, buffer or module, as of every `torch.nn.Module`.

        Raises:
            AttributeError: There is none; if the user's own model has it, the message says how to get there.
        """
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if advice := _attribute_hint(vars(self).get("_modules", {}).get("module"), name):
                raise AttributeError(f"{error}. {advice}") from None
            raise

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

    def forbid_torch_clipping(self) -> None:
        """Reject torch's clipping functions, which would see only a shard of the gradients, unlike the optimizer's."""
        self._has_full_grads = False

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
            ConfigError: `torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.clip_grad_value_` calls, and the gradients
                are not in the parameters, or some are on other ranks.
        """
        if not self._has_full_grads and _is_clipping():
            raise ConfigError(
                "Gradients that are sharded over ranks, or that are in master weights, must be clipped by the boosted "
                "optimizer. Found a call of torch.nn.utils.clip_grad_norm_ or clip_grad_value_ on the boosted model, "
                "which would clip the gradients of each rank by a different norm, or none. Call "
                "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(value), or pass max_norm to the "
                "Booster."
            )
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, only_rank_0: bool | None = None, **kwargs: Any) -> Any:
        """Return the state of this module; or the full state of the user's own model, whatever ranks shard.

        Args:
            *args: Those of `torch.nn.Module.state_dict`.
            only_rank_0: True: the first rank gets the full tensors, in host memory, by the names of the user's own
                model, and the others an empty dict; False: all ranks get them. All ranks call together.
            **kwargs: Those of `torch.nn.Module.state_dict`.

        Returns:
            Without `only_rank_0` what torch returns: tensors as they are on this rank, by names that begin with
            ``module.``.

        Raises:
            UnsupportedError: `only_rank_0` is given, and the model is partitioned into pipeline stages.

        Communication: with `only_rank_0`, all_gather, the ranks that shard a tensor, its bytes.
        """
        if only_rank_0 is None:
            return super().state_dict(*args, **kwargs)
        from colossal._src.interface.full_state_dict import full_state

        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return full_state(unwrap_model(self.module), is_kept=is_first or not only_rank_0)

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """Return the user's own model, with the parameter names that it was built with.

        Args:
            unwrap_peft: Of a model with adapters, return the base model that they adapt; otherwise the
                `peft.PeftModel` that `boost` was given, which can merge them: ``merge_and_unload()``.

        Returns:
            The unwrapped module: not a wrapper such as `ModelWrapper` and `DistributedDataParallel`.
        """
        module = unwrap_model(self.module)
        return model_without_adapters(module) if unwrap_peft else module


def _is_clipping() -> bool:
    """Whether one of torch's functions that clip gradients goes through parameters, directly or in a list."""
    frame = sys._getframe()  # noqa: SLF001 (the only way to find the caller)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == clip_grad.__file__:
            return True
        frame = frame.f_back
    return False


def unwrap_model(module: nn.Module) -> nn.Module:
    """Take all wrappers off a model."""
    found: Any = module
    while isinstance(found, ModelWrapper | DistributedDataParallel):
        found = found.module
    return found


def _attribute_hint(module: nn.Module | None, name: str) -> str:
    """Say how to access an attribute of the original model that the boosted one does not have."""
    if module is None or name.startswith("__"):
        return ""
    original = unwrap_model(module)
    if hasattr(original, name):
        return f"The model that was boosted has it: use model.unwrap().{name}"
    full_spec = full_spec_of(original)
    if full_spec is not None and any(hasattr(root, name) for root in full_spec.roots):
        return f"The model is partitioned into pipeline stages: use {name} of the model before it is boosted"
    return ""
