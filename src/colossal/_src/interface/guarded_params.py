# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false
"""Parameters that refuse what would see only some of the gradients, or none, and notice values that are written.

[Note: where gradients are] With master weights, and with shards of them, the optimizer holds the gradients: those in
the parameters of the model are None after a backward pass, and torch's clipping functions would find nothing to clip.
With tensor parallelism they are in the parameters, and these functions would clip by a different norm on each rank. So
the parameters look at who asks. In a step of the optimizer they are plain ones, because torch's optimizers update only
those by kernels for many tensors.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakMethod, ref

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from colossal._src.amp import MasterParams
from colossal._src.comm import end_graphs_in
from colossal._src.interface.flat_values import FlatValues, flat_ndim, is_flat, is_program, is_range
from colossal._src.interface.scaled_params import (
    ScaledShard,
    expect_scaled,
    expect_unscaled,
    may_be_scaled,
    unscale_for_clipping,
)
from colossal._src.tensor import copy_placement, grad_of, set_grad, set_values, values_of
from colossal.errors import ConfigError

end_graphs_in(__name__)  # a compiled model that reads .data asks between its graphs

_OF_CLIPPING = vars(clip_grad)
_CLIPS_ELSEWHERE = (
    "Gradients that are sharded over ranks, or that are in master weights, must be clipped by the boosted "
    "optimizer. Found a call of torch.nn.utils.clip_grad_norm_ or clip_grad_value_ on the boosted model, "
    "which would clip the gradients of each rank by a different norm, or none. Call "
    "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(value), or pass max_norm to the "
    "Booster."
)

# apart from the parameters, whose copies and files would otherwise contain master weights
_MASTERS = WeakIdKeyDictionary()


class ClippedByOptimizer(nn.Parameter):
    """A parameter whose gradient torch's clipping functions must not take for all of it."""

    plain = nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, unless a clipping function of torch asks, or it has yet to come from the model.

        One that is here in full, and only scaled, is unscaled for that function.
        """
        grad, caller = grad_of(self), sys._getframe(1)  # noqa: SLF001 (the only way to find the caller)
        if caller.f_globals is _OF_CLIPPING:
            if not may_be_scaled(self):
                raise ConfigError(_CLIPS_ELSEWHERE)
            if grad is not None:
                unscale_for_clipping(self)
        if grad is None and not _is_internal(caller):
            self._check_moved()
        if grad is not None and is_program(caller) and is_range(self):
            return copy_placement(grad.as_subclass(FlatValues), self)
        return grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        set_grad(self, grad.to_local() if isinstance(grad, FlatValues) else grad)

    @grad.deleter
    def grad(self) -> None:
        set_grad(self, None)

    @property
    def data(self) -> torch.Tensor:
        """The values, as a tensor by which a program may write them: the next forward pass has what it writes."""
        if _masters_of(self) is None or _is_ours(sys._getframe(1)):  # noqa: SLF001
            return values_of(self)
        values = torch.Tensor.detach(self)  # whose changes torch's counter sees too
        return copy_placement(values.as_subclass(FlatValues), self) if is_range(self) else values

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if _masters_of(self) is None or _is_ours(sys._getframe(1)):  # noqa: SLF001
            set_values(self, data)
            return
        _check_kind(data, values_of(self))
        torch.Tensor.detach(self).copy_(data)

    def detach(self) -> torch.Tensor:
        """The values, in a tensor without a gradient."""
        values = torch.Tensor.detach(self)
        is_seen = is_program(sys._getframe(1)) and is_range(self)  # noqa: SLF001 (as above)
        return copy_placement(values.as_subclass(FlatValues), self) if is_seen else values

    @property
    def ndim(self) -> int:
        """The number of dimensions; to a program, not that of a flat shard."""
        return flat_ndim(self, sys._getframe(1)) if is_flat(self) else len(self.size())  # noqa: SLF001 (as above)

    def dim(self) -> int:
        """The number of dimensions, as `ndim`."""
        return flat_ndim(self, sys._getframe(1)) if is_flat(self) else len(self.size())  # noqa: SLF001 (as above)

    def _check_moved(self) -> None:
        masters = _masters_of(self)
        if masters is not None and masters.has_grad_for(self):
            raise ConfigError(
                "After a backward pass, gradients move to what the optimizer holds at its step, or before, at "
                f"unscale_grad(). Found a read of .grad of one of its parameters, of shape {tuple(self.shape)}, which "
                "is None until then. Call optimizer.unscale_grad() before gradients are read or written."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe it as torch does any parameter."""
        return repr(nn.Parameter(values_of(self), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Make a copy that is a plain parameter, as no optimizer has it."""
        if id(self) not in memo:
            values = values_of(self).clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
            copy_placement(memo[id(self)], self)
        return memo[id(self)]


class WorkingParameter(ClippedByOptimizer):
    """A parameter of the model whose master weight the optimizer updates, and which may hold its gradient."""

    is_view = False  # of memory that something else has, and saves

    ndim: Any = torch.Tensor.ndim
    dim: Any = torch.Tensor.dim
    detach: Any = torch.Tensor.detach

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, unless it is in the optimizer, where the program would not look for it."""
        grad, caller = grad_of(self), sys._getframe(1)  # noqa: SLF001 (the only way to find the caller)
        if caller.f_globals is _OF_CLIPPING:
            raise ConfigError(_CLIPS_ELSEWHERE)
        if grad is None and (not _is_internal(caller) or _is_optimizer(caller)):
            self._check_here("read")
        return grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if not _is_internal(sys._getframe(1)):  # noqa: SLF001
            self._check_here("write")
        set_grad(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self._check_here("write")
        set_grad(self, None)

    @property
    def data(self) -> torch.Tensor:
        """The values, as a tensor by which a program may write them past torch's counter of changes."""
        data, masters = values_of(self), _masters_of(self)
        if masters is not None and not _is_ours(sys._getframe(1)):  # noqa: SLF001
            masters.expect_writes(self, data)
        return data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        masters = _masters_of(self)
        if _is_ours(sys._getframe(1)) or (masters is None and not self.is_view):  # noqa: SLF001
            set_values(self, data)
            return
        values = values_of(self)
        _check_kind(data, values)
        # into the memory that the parameter has, of which the optimizer updates a part
        values.copy_(data)
        if masters is not None:
            masters.expect_writes(self, values)

    def _check_here(self, verb: str) -> None:
        masters = _masters_of(self)
        if masters is not None and masters.holds_grad(self):
            raise ConfigError(
                "After a backward pass the optimizer may hold the gradients, in float32 copies or shards of the "
                f"parameters. Found a {verb} of .grad of a parameter of the model, of shape {tuple(self.shape)}, which "
                "is None while the optimizer holds its gradient. Discard gradients by zero_grad() of the boosted model "
                "or optimizer; clip, measure and read them by the optimizer: clip_grad_by_norm, get_grad_norm, and "
                "optimizer.parameters after optimizer.unscale_grad(). Update parameters by the boosted optimizer only: "
                "another one finds no gradients."
            )


def _check_kind(data: torch.Tensor, values: torch.Tensor) -> None:
    if (found := (data.shape, data.dtype, data.device)) != (values.shape, values.dtype, values.device):
        raise ConfigError(
            "Parameters whose master weights or shards an optimizer updates keep their shape, dtype and device. Found "
            f"other data for one of {tuple(values.shape)} in {values.dtype} on {values.device}: {tuple(found[0])} in "
            f"{found[1]} on {found[2]}. Cast, move or resize the model before boost, or a copy of it: "
            "copy.deepcopy(model.unwrap())."
        )


_GUARDED = (ClippedByOptimizer, WorkingParameter)


def guard_parameters(
    held: Iterable[nn.Parameter],
    masters: MasterParams | None,
    *,
    has_full_grads: bool,
    unscale: WeakMethod[Any] | None = None,
) -> None:
    """Guard what an optimizer holds and the parameters of the model; or lift that, where gradients are in full.

    Full gradients that are scaled are unscaled by `unscale` when a clipping function of torch asks.
    """
    kind = nn.Parameter if has_full_grads and unscale is None else ClippedByOptimizer
    for parameter in held:
        _become(parameter, kind)
        if has_full_grads and unscale is not None:
            expect_scaled(parameter, unscale)
    for parameter in () if masters is None else masters.pairs.values():
        _become(parameter, WorkingParameter)
        _MASTERS[parameter] = ref(masters)
    for parameter in () if masters is None else masters.pairs:
        _MASTERS[parameter] = ref(masters)


@final
class GuardedState(defaultdict[Any, Any]):
    """The states of an optimizer, which it has of what it holds, and not of the parameters of the model."""

    def __missing__(self, parameter: Any) -> Any:
        if isinstance(parameter, torch.Tensor) and has_master_weight(parameter):
            raise ConfigError(
                "The optimizer holds float32 copies or shards of the parameters of the model, and has states of these. "
                f"Found a read of the state of a parameter of the model, of shape {tuple(parameter.shape)}. Use those "
                "of optimizer.parameters, or on all ranks the full ones, by number: "
                'optimizer.state_dict(only_rank_0=False)["state"][number].'
            )
        return super().__missing__(parameter)


def guard_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the states of an optimizer of master weights refuse questions about the parameters of the model."""
    if type(optimizer.state) is defaultdict:
        optimizer.state = GuardedState(optimizer.state.default_factory, optimizer.state)


def lift_guards(parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters plain ones, as before an optimizer was boosted."""
    for parameter in parameters:
        _become(parameter, nn.Parameter)


@contextmanager
def plain_parameters(held: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let what an optimizer holds be plain parameters while it updates them: it takes only these all at once."""
    guarded: list[Any] = [each for each in held if isinstance(each, ClippedByOptimizer | ScaledShard)]
    kinds = [type(parameter) for parameter in guarded]
    for parameter, kind in zip(guarded, kinds, strict=True):
        parameter.__class__ = kind.plain
    try:
        yield
    finally:
        for parameter, kind in zip(guarded, kinds, strict=True):
            parameter.__class__ = kind


def discard_gradients(optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
    """Discard the gradients of what an optimizer holds: by its own method, unless that is torch's and frees them."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    inside: Any = torch.autograd
    is_of_torch = getattr(optimizer.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad
    # a profiler shows the loop of torch by its name
    if set_to_none and is_of_torch and not inside._profiler_enabled():  # noqa: SLF001 (it has no public name)
        for parameter in held:
            set_grad(parameter, None)
        return
    with plain_parameters(held):
        optimizer.zero_grad(set_to_none)


def _become(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    # in place: layers and optimizers refer to this object; not DTensors, nor those that are fetched or quantized
    expect_unscaled(parameter)
    if type(parameter) in (nn.Parameter, *_GUARDED):
        parameter.__class__ = kind


def has_master_weight(parameter: torch.Tensor) -> bool:
    """Whether a boosted optimizer updates a copy or shards of a parameter in its place."""
    masters = _masters_of(parameter)
    return masters is not None and parameter not in masters.pairs


def _masters_of(parameter: torch.Tensor) -> MasterParams | None:
    found = _MASTERS.get(parameter)
    return None if found is None else found()


def _is_internal(caller: Any) -> bool:
    """Whether a function is one of torch or of this library, but `zero_grad` of a module, which a program calls."""
    name: str = caller.f_globals.get("__name__", "")
    return name.startswith(("torch.", "colossal.")) and caller.f_code is not nn.Module.zero_grad.__code__


def _is_optimizer(caller: Any) -> bool:
    """Whether an optimizer of torch asks, which has parameters of the model and would see none of their gradients."""
    return str(caller.f_globals.get("__name__", "")).startswith("torch.optim.")


def _is_ours(caller: Any) -> bool:
    return str(caller.f_globals.get("__name__", "")).startswith("colossal.")
