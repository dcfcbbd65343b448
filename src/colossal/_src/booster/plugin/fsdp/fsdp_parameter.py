# pyright: reportIncompatibleVariableOverride=false
"""What a program does with the shards of FSDP2 between passes: as with full parameters, or refused with what to do."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from colossal._src.booster.plugin.fsdp.fsdp_pass_checks import is_in_backward
from colossal._src.comm import CallOfAllRanks
from colossal._src.interface import any_scaled, is_program, kind_of_shard
from colossal._src.tensor import full_tensor_of, grad_of, set_grad, values_of
from colossal.errors import ConfigError, UnsupportedError

_ATEN: Any = torch.ops.aten
_DRAWN_IN_PLACE = (_ATEN.uniform_, _ATEN.normal_, _ATEN.bernoulli_, _ATEN.exponential_, _ATEN.log_normal_)
_DRAWN_LIKE = (_ATEN.rand_like, _ATEN.randn_like, _ATEN.randint_like)


class GuardedShard(DTensor):
    """A parameter that FSDP2 sharded, or a view of one, as a program sees it; a step of the optimizer sees DTensors.

    [Note: full values] What torch cannot run on shards, or on a shard and a full tensor, runs on full tensors here, on
    all ranks, and what it writes is sharded again. Torch gathers what a view along the sharded dimension shows: what is
    written into that is written into the shards too.
    """

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        """The shard, as a tensor by which a program may write it."""
        return values_of(self)

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        found = tuple(data.shape), data.dtype, data.device.type
        if found != (wanted := (tuple(self.shape), self.dtype, self.device.type)):
            raise ConfigError(
                "Parameters that are sharded over ranks keep their shape, dtype and device. Found other data for one "
                f"of {list(wanted[0])} in {wanted[1]} on {wanted[2]}: {list(found[0])} in {found[1]} on {found[2]}. "
                "Cast, move or resize the model before boost."
            )
        # FSDP2 gathers the memory that the parameter has, whatever tensor takes its place
        values_of(self).copy_(data)

    def numpy(self, *, force: bool = False) -> Any:
        """Show the full values as an array that cannot be written.

        Communication: as `full_tensor`.
        """
        array: Any = full_tensor_of(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the full values as lists; communication: as `full_tensor`."""
        return full_tensor_of(self).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Make a copy that is torch's own DTensor."""
        if id(self) not in memo:
            values = _plain(self).detach().clone()
            memo[id(self)] = nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Write torch's own DTensor, which other programs can read."""
        plain = _plain(self)
        vars(plain).update(vars(self))
        return plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as torch does on DTensors, or on full tensors.

        Communication: all_gather, the axes that shard the operands, their bytes, where torch or this redistributes.
        """
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default and isinstance(args[0], DTensor) and args[0].shape == args[1].shape:
            args = (args[0], _shard_like(args[1], args[0]), *args[2:])
        written = _written(func, args, kwargs)
        if "out" in kwargs:  # to whose shard torch gives the full shape
            return _run_on_full(func, args, kwargs, written, None)
        try:
            result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not any(text in str(error) for text in _TORCH_CANNOT):
                raise
            return _run_on_full(func, args, kwargs, written, error)
        for tensor in written:
            _write_through(tensor)
        if written:
            return written[0] if isinstance(result, DTensor) else result
        for number, tensor in enumerate(result if isinstance(result, list | tuple) else [result]):
            if isinstance(tensor, DTensor):
                tensor.__class__ = cls
                if func.is_view:
                    _remember(tensor, args[0], partial(_take, func, args[1:], kwargs, number))
        return result


_TORCH_CANNOT = ("mixed torch.Tensor and DTensor", "sharding strategy", "Sharding propagation failed")
_ADVICE = (
    "Under TorchFSDPPlugin parameters are shards between passes, DTensors, on which torch runs most operations. Found "
    "{}, which it cannot run on them. On all ranks take full values, by parameter.full_tensor() or "
    "model.state_dict(only_rank_0=False), compute with these, and write what is to count into the parameter by copy_ "
    "under torch.no_grad(). Use weight_decay of the optimizer for a penalty of weights; what else of them belongs to a "
    "loss is computed inside of a module's forward, where its own parameters are full."
)


def _run_on_full(func: Any, args: Any, kwargs: Any, written: list[Any], error: Exception | None) -> Any:
    """Run an operation on full tensors; not one whose result would have to stay connected to the shards."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    trains = is_in_backward() or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
    returns = func._schema.returns  # noqa: SLF001 (torch has no public name for it)
    if func.is_view or (trains and any("Tensor" in str(each.type) for each in returns)):
        raise UnsupportedError(_ADVICE.format(func.overloadpacket.__name__)) from error
    with CallOfAllRanks(f"take full values of sharded parameters, for {func.overloadpacket.__name__},"):
        full = {id(each): each.full_tensor() for each in tensors if isinstance(each, DTensor)}
    full_args, full_kwargs = tree_map_only(DTensor, lambda each: full[id(each)], (args, kwargs))
    result = func(*full_args, **full_kwargs)
    for tensor in written:
        tensor.copy_(full[id(tensor)])
    return written[0] if written and isinstance(result, torch.Tensor) else result


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Find the DTensors that an operation writes."""
    declared = func._schema.arguments  # noqa: SLF001 (torch has no public name for it)
    given = [
        *zip(declared, args, strict=False),
        *((each, kwargs[each.name]) for each in declared if each.name in kwargs),
    ]
    written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in tree_leaves(written) if isinstance(each, DTensor)]


def _take(func: Any, args: Any, kwargs: Any, number: int, full: torch.Tensor) -> torch.Tensor:
    """Take a view of a full tensor, one of several where there are some."""
    views = func(full, *args, **kwargs)
    return views[number] if isinstance(views, list | tuple) else views


def _remember(view: Any, source: Any, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Remember what a view shows that has memory of its own, or is a view of one that has."""
    held = [each._local_tensor for each in (view, source)]  # noqa: SLF001 (to_local would be one of its operations)
    if held[0].untyped_storage().data_ptr() != held[1].untyped_storage().data_ptr() or "_view_of" in vars(source):
        vars(view)["_view_of"] = source, take


def _write_through(view: Any) -> None:
    """Write what a view shows into the tensor that it is a view of."""
    if "_view_of" in vars(view):
        source, take = vars(view)["_view_of"]
        full = source.full_tensor()
        take(full).copy_(view.full_tensor())
        source.copy_(full)


def _plain(sharded: Any) -> Any:
    """A DTensor of the same values, as torch's."""
    made: Any = DTensor
    return made(sharded._local_tensor, sharded._spec, requires_grad=sharded.requires_grad)  # noqa: SLF001 (no public name)


def _shard_like(value: torch.Tensor, sharded: DTensor, source: int | None = None) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value
    there = value.detach().to(sharded.device_mesh.device_type)
    return distribute_tensor(there, sharded.device_mesh, sharded.placements, src_data_rank=source).to(sharded.device)


# weakly, as that holds the parameter
_HELD = WeakIdKeyDictionary()


@final
class UnreducedShard(GuardedShard):
    """A parameter whose full gradient a pass in `no_sync` may have left apart from it."""

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, unless a program asks for one that is not reduced yet."""
        grad = grad_of(self)
        caller = sys._getframe(1)  # noqa: SLF001 (the only way to find the caller)
        if grad is None and self in _HELD and is_program(caller) and is_unreduced(_HELD[self]()):
            raise ConfigError(
                "Inside of no_sync, FSDP2 keeps full gradients of each rank apart from the parameters, which are "
                f"shards. Found a read of .grad of one of shape {tuple(self.shape)} before they are reduced, which is "
                "None. Run the last backward pass before gradients are read or changed outside of no_sync."
            )
        return grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        set_grad(self, grad)

    @grad.deleter
    def grad(self) -> None:
        set_grad(self, None)


def is_unreduced(held: Any) -> bool:
    """Whether a full gradient is there that is not reduced yet, in what torch holds for a parameter."""
    gathered = getattr(held, "_unsharded_param", None)
    return gathered is not None and (gathered.grad is not None or held.unsharded_accumulated_grad is not None)


def remember_held(held: Iterable[Any]) -> None:
    """Remember what torch holds for each parameter, once: passes in `no_sync` then take no more time for it."""
    for each in held:
        _HELD[each.sharded_param] = ref(each)


def watch_unreduced(parameters: Iterable[nn.Parameter]) -> None:
    """Let parameters say that their gradients are not reduced."""
    sharded: Any
    for sharded in parameters:
        if issubclass(type(sharded), GuardedShard):
            sharded.__class__ = UnreducedShard


def guard_shards(parameters: Iterable[nn.Parameter], *_step: object) -> None:
    """Let programs see sharded parameters by the guarded type."""
    sharded: Any
    is_scaled = any_scaled()
    for sharded in parameters:
        if type(sharded) in (DTensor, UnreducedShard):
            kind: Any = kind_of_shard(sharded, GuardedShard) if is_scaled else GuardedShard
            sharded.__class__ = kind  # in place: layers and optimizers refer to this object


def unguard_shards(parameters: Iterable[nn.Parameter], *_step: object) -> None:
    """Make sharded parameters torch's own, on which operations take less time."""
    sharded: Any
    for sharded in parameters:
        if issubclass(type(sharded), GuardedShard):
            sharded.__class__ = DTensor


def complete_dtensors() -> None:
    """Let torch compute numbers and random values of DTensors as those of the full tensors.

    [Note: what torch does with shards] It takes the number of `item()` and `float()` from the local tensor, though a
    norm or a sum of shards has yet to be reduced; and on the CPU, ranks of equal seeds draw the same values for all
    shards.
    """
    inside: Any = DTensor
    handlers = inside._op_dispatcher._custom_op_handlers  # noqa: SLF001 (torch has no public name for it)
    handlers[_ATEN._local_scalar_dense.default] = _to_number  # noqa: SLF001 (what torch calls it)
    for drawn in _DRAWN_IN_PLACE:
        handlers |= {getattr(drawn, name): _draw_in_place for name in drawn.overloads() if "out" not in name}
    for drawn in _DRAWN_LIKE:
        handlers |= {getattr(drawn, name): _draw_like for name in drawn.overloads() if "out" not in name}


def _to_number(operation: Any, args: Any, _kwargs: Any) -> Any:
    """Communication: all_reduce, the axes that shard the tensor, its bytes; none of a tensor that is full."""
    with CallOfAllRanks("take a number of sharded tensors, by float() or item() of a norm or a sum,"):
        return operation(args[0].full_tensor())


@torch.no_grad()
def _draw_in_place(operation: Any, args: Any, kwargs: Any) -> Any:
    drawn: Any = args[0]
    drawn.copy_(_draw_like(operation, args, kwargs))
    return drawn


@torch.no_grad()
def _draw_like(operation: Any, args: Any, kwargs: Any) -> Any:
    """Draw a full tensor, and keep a shard.

    Communication: none, or broadcast, the axes that replicate the tensor, where ranks with other seeds hold a replica.
    """
    like: Any = args[0]
    full = torch.empty(like.shape, dtype=like.dtype, device=like.device_mesh.device_type)
    is_replicated = not all(placement.is_shard() for placement in like.placements)
    drawn = operation(full, *args[1:], **(kwargs or {}))
    return _shard_like(drawn, like, 0 if is_replicated else None)
