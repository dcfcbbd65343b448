"""From `__torch_function__` to what an operation means for distributed tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colossal._src.legacy.tensor.operators import name_of, run_rule, size
from colossal._src.legacy.tensor.param_op_hook import has_param_hooks, run_with_hooks
from colossal._src.legacy.tensor.sharding import OperatorCall, TensorSharding, sharding_of, tensors_in
from colossal._src.tensor import placement_of, sharded_gradient

_Wrap = Callable[[torch.Tensor, TensorSharding], torch.Tensor]

_LOCAL = frozenset(
    [
        "dim",
        "ndimension",
        "nelement",
        "numel",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "stride",
        "storage_offset",
        "get_device",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "is_inference",
        "is_shared",
        "share_memory_",
        "__len__",
        "__hash__",
        "has_names",
        "is_same_size",
        "data_ptr",
        "untyped_storage",
        "storage",
        "backward",
        "is_pinned",
        "is_tensor",
        "is_conj",
        "is_neg",
        "set_",
        "detach_",
        "rename_",
        "type_",
        "__set__",
        "__delete__",
        "__format__",
    ]
)
"""Operations that describe a tensor, or belong to its gradient: they are about what this rank has."""

_VIEWS = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes that are operations."""


def run_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Any, wrap: _Wrap) -> Any:
    """Run an operation that has a distributed tensor among its arguments."""
    name = name_of(func)
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute not in _VIEWS:
            return _attribute(attribute, func, args, kwargs, run)
    elif name in _LOCAL or (name.startswith(("_foreach_", "_fused_", "_amp_")) and name.endswith("_")):
        return run(func, args, kwargs)
    call = OperatorCall(func, args, kwargs, run, wrap)
    if func is torch.Tensor.size:
        return size(call, *args, **kwargs)
    if name.endswith("_like"):
        return _like(call)
    if has_param_hooks() and not name.endswith("_"):  # what updates a parameter uses none of its values elsewhere
        return run_with_hooks(
            lambda args, kwargs: _compute(OperatorCall(func, args, kwargs, run, wrap)), args, kwargs, wrap
        )
    return _compute(call)


def _compute(call: OperatorCall) -> Any:
    if call.sharded is None:
        result = call.run(call.func, *call.args, **call.kwargs)
        return result if not call.known else call.wrap_full(result, call.known[0])
    return run_rule(call)


def _attribute(attribute: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Any) -> Any:
    value = run(func, args, kwargs)
    sharding = sharding_of(args[0])
    if attribute in ("grad", "_grad") and value is not None and sharding is not None and sharding.dim is not None:
        return sharded_gradient(value, placement_of(args[0]))
    return value


def _like(call: OperatorCall) -> Any:
    """Make a tensor that is distributed as another; of a parameter a plain local one, as the states of optimizers."""
    tensor: Any = call.args[0] if call.args else next(tensors_in(call.kwargs))
    made = call.run(call.func, *call.args, **call.kwargs)
    sharding = sharding_of(tensor)
    if sharding is None or isinstance(tensor, torch.nn.Parameter):
        return made
    return call.wrap_as(made, sharding)
