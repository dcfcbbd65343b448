"""Training without keys and values of earlier tokens, which models of transformers keep by default."""

import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, final
from weakref import WeakSet

import torch
from torch import nn

# [Note: packed sequences]
# Without such a cache, transformers looks in each forward pass whether positions begin anew within a row, and the host
# has to wait for what an accelerator answers. If the caller passes no positions, the model counts them itself, and the
# answer is known. It is known too where one process would have kept a cache: then transformers takes a row for one
# sequence, whatever its positions are, and so do we.
_CALLS = threading.local()
_HOOKED: "WeakSet[nn.Module]" = WeakSet()
_POSITIONS, _CACHE = "position_ids", "use_cache"


def configs_with_cache(model: nn.Module) -> list[Any]:
    """Find the configurations that say whether keys and values are kept, which training has no use for."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


def stop_caching(model: nn.Module) -> None:
    """Let a model keep no keys and values, and make the host wait for nothing because of it."""
    kept = {id(config): config.use_cache for config in configs_with_cache(model)}
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
        # Stages of a pipeline come here again, to shard their sequences: what the program chose is known by then.
        if module in _HOOKED or not hasattr(module, "config"):
            continue
        names = list(signature(module.forward).parameters)
        if _POSITIONS in names:
            _HOOKED.add(module)
            enter = _EnterCall(names, bool(kept.get(id(module.config))))
            module.register_forward_pre_hook(enter, with_kwargs=True)
            # Also after an exception, by which the pass of a pipeline stage ends: the stack would keep growing.
            module.register_forward_hook(_leave, always_call=True)


def _unless_known(find: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    @wraps(find)
    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        calls = getattr(_CALLS, "counts", [])
        return None if calls and calls[-1] else find(position_ids)

    return found


@final
class _EnterCall:
    """Forward pre-hook: notes whether it is known that no row has several sequences."""

    def __init__(self, names: Sequence[str], keeps_cache: bool) -> None:
        self._names = tuple(names)  # of the arguments
        self._keeps_cache = keeps_cache  # by the configuration, as the program had set it

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # there transformers does not look
            return
        if not hasattr(_CALLS, "counts"):
            _CALLS.counts = list[bool]()
        passed = dict(zip(self._names, args, strict=False)) | kwargs
        chosen = passed.get(_CACHE)
        keeps_cache = self._keeps_cache if chosen is None else chosen
        recomputes = module.training and getattr(module, "gradient_checkpointing", False)  # and so keeps none
        _CALLS.counts.append(passed.get(_POSITIONS) is None or (keeps_cache and not recomputes))


def _leave(*_call: Any) -> None:
    # none is there after an exception of a hook before that which enters
    if not torch.compiler.is_compiling() and getattr(_CALLS, "counts", None):
        _CALLS.counts.pop()
