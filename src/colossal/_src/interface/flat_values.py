# pyright: reportIncompatibleMethodOverride=false
"""What a program sees of flat shards: elements of one rank, which it must not take for all, or for rows and columns."""

from typing import Any, NoReturn

import torch

from colossal._src.comm import CallOfAllRanks
from colossal._src.tensor import copy_placement, full_tensor_of, placement_of
from colossal.errors import ConfigError

_OF_ROWS = frozenset(["dim", "ndim", "T", "mT", "t", "matmul", "mm", "mv"])
_MEASURES = frozenset([
    "sum", "mean", "norm", "vector_norm", "_foreach_norm", "max", "min", "amax", "amin", "aminmax", "std", "var",
    "median", "quantile", "prod", "dot", "any", "all", "argmax", "argmin", "count_nonzero", "nansum", "logsumexp",
])  # fmt: skip
"""What is computed of all elements."""
_BY_ELEMENT = frozenset([
    "data", "detach", "square", "pow", "__pow__", "abs", "mul", "__mul__", "float", "double", "to", "isnan", "isinf",
    "isfinite",
])  # fmt: skip
"""What a measure may follow, and is one of these elements still."""


class FlatValues(torch.Tensor):
    """Values or a gradient of a flat shard of a parameter; what is computed of it is a plain tensor, or refused."""

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the elements here, unless the result would look like that of the full tensor."""
        kwargs, name = kwargs or {}, _name_of(func)
        if name in _OF_ROWS and is_flat(args[0]):
            refuse_rows("a question for its number of dimensions" if "dim" in name else f"a use of {name}")
        if name in _MEASURES:
            _check_measure(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (torch's own subclasses use it)
            try:
                if func == _SET_DATA:  # of the gradient too, of which this is a view
                    return args[0].copy_(args[1])
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if "must match the size" in str(error) or "shape" in str(error):
                    refuse_rows(f"{name} with a tensor of another shape", error)
                raise
        keeps_elements = name in _BY_ELEMENT and isinstance(args[0], cls)
        return copy_placement(result.as_subclass(cls), args[0]) if keeps_elements else result

    def to_local(self) -> torch.Tensor:
        """Return the elements of this rank as a plain tensor, which shares their memory."""
        return self.as_subclass(torch.Tensor)

    def full_tensor(self) -> torch.Tensor:
        """Put the full tensor together, in the shape of the parameter.

        Communication: all_reduce, the ranks that shard the parameter, the bytes of the full tensor; all of them call.
        """
        with CallOfAllRanks("take a full tensor of shards, by full_tensor(),"):
            return full_tensor_of(copy_placement(self.to_local().detach(), self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Write a plain tensor."""
        return self.to_local().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy a plain tensor."""
        return memo.setdefault(id(self), self.to_local().detach().clone())


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _name_of(func: Any) -> str:
    return (func.__self__.__name__ if func.__name__ == "__get__" else func.__name__).removeprefix("linalg_")


def _check_measure(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    values, *options = args
    if name in ("max", "min") and isinstance((options or [None])[0], torch.Tensor):  # of two tensors
        return
    measured = [
        each for each in (values if isinstance(values, list | tuple) else [values]) if isinstance(each, FlatValues)
    ]
    has_dim = kwargs.get("dim") is not None or any(isinstance(each, int | tuple) for each in options["norm" in name :])
    if has_dim and any(map(is_flat, measured)):
        refuse_rows(f"{name} along a dimension")
    if any(placement_of(each).is_sharded for each in measured):
        raise ConfigError(
            f"Each rank has a shard of a parameter, and of its gradient. Found {name} of one, which is that of the "
            "elements of this rank. For the norm of all gradients call optimizer.get_grad_norm() on all ranks. For "
            "another measure take the full tensor on all ranks, as parameter.grad.full_tensor(), or that of the "
            "elements here, parameter.grad.to_local(), and reduce it over ranks."
        )


def is_flat(held: torch.Tensor) -> bool:
    """Whether what an optimizer holds is a flat shard of a parameter with other dimensions."""
    return len(held.size()) != len(placement_of(held).shape)


def is_range(held: torch.Tensor) -> bool:
    """Whether what an optimizer holds is flat, or a range of the elements of a parameter with one dimension."""
    return placement_of(held).flat is not None or is_flat(held)


def flat_ndim(flat: torch.Tensor, caller: Any) -> int:
    """Return a number of dimensions, to all but a program, which would go on to rows and columns."""
    if is_program(caller):
        refuse_rows("a question for its number of dimensions")
    return len(flat.size())


def refuse_rows(what: str, error: Exception | None = None) -> NoReturn:
    """Say where values with rows and columns are."""
    raise ConfigError(
        "ZeRO and Gemini update flat shards of parameters, which have no rows and columns. Found "
        f"{what}, of a shard or of its gradient. Make parameter groups before boost. Change gradients by hooks of the "
        "model's parameters, parameter.register_hook(change), if the change of a mean of gradients is the mean of "
        "changed ones, as in gradient centralization, or of masked ones. On all ranks read full values by "
        "full_tensor() of parameter.grad and parameter.data. For others take TorchDDPPlugin or TorchFSDPPlugin, where "
        "optimizer.param_groups has parameters with rows and columns."
    ) from error


def is_program(caller: Any) -> bool:
    """Whether a function is neither one of torch nor of this library."""
    return not str(caller.f_globals.get("__name__", "")).startswith(("torch.", "colossal."))
