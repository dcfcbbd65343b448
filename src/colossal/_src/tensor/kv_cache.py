"""Training without keys and values of earlier tokens, which models of transformers keep by default."""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import nn

# [Note: packed sequences]
# Without such a cache, transformers looks in each forward pass whether positions begin anew within a row, and the host
# has to wait for what an accelerator answers. If the caller passes no positions, the model counts them itself, and the
# answer is known.
_CALLS = threading.local()
_POSITIONS = "position_ids"


def configs_with_cache(model: nn.Module) -> list[Any]:
    """Find the configurations that say whether keys and values are kept, which training has no use for."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


def stop_caching(model: nn.Module) -> None:
    """Let a model keep no keys and values, and make the host wait for nothing because of it."""
    for config in configs_with_cache(model):
        config.use_cache = False
    masks: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is None:
        return
    # Once for the process: a second model must not wrap the wrapper.
    if not hasattr(find, "__wrapped__"):
        masks.find_packed_sequence_indices = _unless_known(find)
    for module in model.modules():
        if hasattr(module, "config") and _POSITIONS in signature(module.forward).parameters:
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            # Also after an exception, by which the pass of a pipeline stage ends: the stack would keep growing.
            module.register_forward_hook(_leave, always_call=True)


def _unless_known(find: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    @wraps(find)
    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        calls = getattr(_CALLS, "counts", [])
        return None if calls and calls[-1] else find(position_ids)

    return found


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():  # there transformers does not look
        return
    if not hasattr(_CALLS, "counts"):
        _CALLS.counts = list[bool]()
    passed = signature(module.forward).bind_partial(*args, **kwargs).arguments
    _CALLS.counts.append(passed.get(_POSITIONS) is None)


def _leave(*_call: Any) -> None:
    if not torch.compiler.is_compiling():
        _CALLS.counts.pop()
