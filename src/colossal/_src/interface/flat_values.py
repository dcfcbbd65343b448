# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false
"""What a program sees of flat shards: elements, among which it must not look for rows and columns."""

import sys
from typing import Any, NoReturn

import torch

from colossal._src.tensor import placement_of
from colossal.errors import ConfigError

_NORM = (
    "Each rank has a shard of a parameter, and of its gradient. Found a norm of a shard, which is that of the elements "
    "of this rank. For the norm of all gradients call optimizer.get_grad_norm() on all ranks; for another one add up "
    "squares over ranks: dist.all_reduce(shard.square().sum())."
)


_inside: Any = torch
_AS_OF_PARAMETERS = _inside._C._disabled_torch_function_impl  # noqa: SLF001 (torch has no public name for it)


class FlatValues(torch.Tensor):
    """Values or a gradient of a flat shard of a parameter that has rows; what is computed of it is a plain tensor."""

    __torch_function__: Any = _AS_OF_PARAMETERS

    @property
    def ndim(self) -> int:
        """Their number of dimensions, which a program must not take for that of the parameter."""
        return flat_ndim(self, sys._getframe(1))  # noqa: SLF001 (the only way to find the caller)

    def dim(self) -> int:
        """Their number of dimensions, as `ndim`."""
        return flat_ndim(self, sys._getframe(1))  # noqa: SLF001 (as above)

    def mean(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the mean of the elements here; not that of rows or columns."""
        return refuse_rows("a mean along a dimension") if args or "dim" in kwargs else super().mean(**kwargs)

    def sum(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the elements here up; not those of rows or columns."""
        return refuse_rows("a sum along a dimension") if args or "dim" in kwargs else super().sum(**kwargs)

    def norm(self, p: Any = "fro", dim: Any = None, **kwargs: Any) -> Any:
        """Measure the norm of all elements; not that of rows or columns, or of those of one rank."""
        if dim is not None:
            refuse_rows("a norm along a dimension")
        if placement_of(self).is_sharded:
            raise ConfigError(_NORM)
        return super().norm(p, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Write a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy a plain tensor."""
        return memo.setdefault(id(self), self.detach().clone())


def is_flat(held: torch.Tensor) -> bool:
    """Whether what an optimizer holds is a flat shard of a parameter with other dimensions."""
    return len(held.size()) != len(placement_of(held).shape)


def flat_ndim(flat: torch.Tensor, caller: Any) -> int:
    """Return a number of dimensions, to all but a program, which would go on to rows and columns."""
    if is_program(caller):
        refuse_rows("a question for its number of dimensions")
    return len(flat.size())


def refuse_rows(what: str) -> NoReturn:
    """Say where gradients with rows and columns are."""
    raise ConfigError(
        "ZeRO and Gemini update flat shards of parameters, which have no rows and columns. Found "
        f"{what}, of a shard or of its gradient. Make parameter groups before boost. Change gradients by hooks of the "
        "model's parameters, parameter.register_hook(change), if the change of a mean of gradients is the mean of "
        "changed ones, as in gradient centralization. For others take TorchDDPPlugin or TorchFSDPPlugin, where "
        "optimizer.param_groups has parameters with rows and columns."
    )


def is_program(caller: Any) -> bool:
    """Whether a function is neither one of torch nor of this library."""
    return not str(caller.f_globals.get("__name__", "")).startswith(("torch.", "colossal."))
