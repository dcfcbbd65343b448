# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A tensor that knows how its values come about, and has none yet."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from colossal._src.lazy.recipe import Owner, View
from colossal.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from colossal._src.tensor import Layout

_VALUES = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
_aten = torch.ops.aten
_OWN = {"_view", "_owner", "_is_param"}
_TO = _aten._to_copy.default  # noqa: SLF001 (what `to` calls)
_HARMLESS = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _TO}


@final
class LazyTensor(torch.Tensor):
    """A tensor without memory, built inside of `LazyInitContext`; a parameter if it is wrapped in one.

    Example:
        >>> import torch
        >>> from colossal.lazy import LazyInitContext, LazyTensor
        >>> with LazyInitContext():
        ...     layer = torch.nn.Linear(2, 3)
        >>> isinstance(layer.weight, LazyTensor), isinstance(layer.weight, torch.nn.Parameter), layer.weight.shape
        (True, True, torch.Size([3, 2]))
    """

    _view: View
    _owner: Owner

    def values(self) -> torch.Tensor:
        """Make the values.

        Returns:
            A tensor of the same shape, dtype and device; it shares memory with the values of other views.

        Example:
            >>> import torch
            >>> from colossal.lazy import LazyInitContext
            >>> with LazyInitContext():
            ...     ones = torch.ones(2)
            >>> ones.values()
            tensor([1., 1.])
        """
        with _disable_current_modes():
            return self._view.on(self._view.recipe.storage())

    def flat_values(self, begin: int, end: int) -> torch.Tensor:
        """Make some of the values, as if the tensor had one dimension; it stays lazy.

        Of what `from_pretrained` left in a file, only these are read. Other tensors are temporarily computed in full.

        Args:
            begin: The first element.
            end: One past the last element.

        Returns:
            A tensor with `end - begin` elements, of the same dtype and device, in newly allocated memory.

        Raises:
            ConfigError: There are no such elements.

        Example:
            >>> import torch
            >>> from colossal.lazy import LazyInitContext
            >>> with LazyInitContext():
            ...     table = torch.arange(6).view(2, 3)
            >>> table.flat_values(2, 5)
            tensor([2, 3, 4])
        """
        from colossal._src.lazy.ranges import read_range

        if not 0 <= begin <= end <= self.numel():
            raise ConfigError(
                f"A range of elements must be one of the tensor. Found {begin} to {end} of {self!r}, which has "
                f"{self.numel()} elements. Pass 0 <= begin <= end <= {self.numel()}."
            )
        with torch.no_grad(), _disable_current_modes():
            return read_range(self._view, begin, end)

    def shard_values(self, layout: "Layout", rank: int) -> torch.Tensor:
        """Make what a rank holds of the values; the tensor stays lazy.

        Of what `from_pretrained` left in a file, only that is read. Other tensors are temporarily computed in full.

        Args:
            layout: How the tensor is sharded over ranks.
            rank: A global rank.

        Returns:
            A new tensor of `layout.local_shape(rank)`.

        Raises:
            ShapeError: The layout is that of another shape.
            PlanError: The rank holds no part of it.

        Example:
            >>> import torch
            >>> from colossal.lazy import LazyInitContext
            >>> from colossal.tensor import Layout
            >>> with LazyInitContext():
            ...     table = torch.arange(6).view(2, 3)
            >>> table.shard_values(Layout.parse("S0R", (2, 3), grid=(2,)), rank=1)
            tensor([[3, 4, 5]])
        """
        from colossal._src.lazy.shards import read_shard, reader_of
        from colossal._src.tensor import shard

        with torch.no_grad(), _disable_current_modes():
            reader = reader_of(self._view) if tuple(self.shape) == layout.shape and not layout.partial else None
            if reader is not None:
                return read_shard(reader, self._view, layout, rank)
            kept = self._view.recipe.has_kept
            part = shard(self.values(), layout, rank)
            if not kept:
                self._view.recipe.forget()  # or the full values would stay in memory as long as the tensor
            return part

    def materialize(self) -> torch.Tensor:
        """Turn into a tensor with values, in place: whoever holds it has it.

        Returns:
            The tensor itself, of the class `torch.Tensor` or `torch.nn.Parameter`.

        Raises:
            UnsupportedError: Somebody holds a weak reference to it.

        Example:
            >>> import torch
            >>> from colossal.lazy import LazyInitContext
            >>> with LazyInitContext():
            ...     layer = torch.nn.Linear(2, 3)
            >>> layer.bias.materialize() is layer.bias, type(layer.bias).__name__, type(layer.weight).__name__
            (True, 'Parameter', 'LazyTensor')
        """
        values = self.values()
        real = nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values  # pyright: ignore[reportUnnecessaryIsInstance]
        real.requires_grad_(self.requires_grad)
        vars(real).update({name: value for name, value in vars(self).items() if name not in _OWN})
        try:
            torch.utils.swap_tensors(self, real)
        except RuntimeError as error:
            raise UnsupportedError(
                f"A tensor is materialized in place, which torch supports only without weak references to it. Found "
                f"{self!r}: {error}. Materialize the model before such references are made."
            ) from error
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Describe it without its values."""
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device.type!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyTensor":
        """Copy the tensor, in a separate storage."""
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.detach().clone()
            made = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy  # pyright: ignore[reportUnnecessaryIsInstance]
            vars(made).update({name: value for name, value in vars(self).items() if name not in _OWN})
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; those that leave torch get values."""
        if func in _VALUES:
            return func(args[0].values().detach(), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (the documented way to go on)  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__ and all(isinstance(each, LazyTensor) for each in args):  # type: ignore[attr-defined]
            set_view(args[0], view_of(args[1]))
        return result

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Reject operations that need values, outside of the context."""
        from colossal._src.lazy.recorder import record

        if func in _HARMLESS:
            return record(func, args, kwargs or {})
        raise UnsupportedError(
            f"A model that was built lazily has no values until it is boosted. Found {func} on a tensor of shape "
            f"{next((tuple(each.shape) for each in args if isinstance(each, LazyTensor)), '?')}. Pass the model to "
            "Booster.boost, or to LazyInitContext.materialize."
        )


def make_lazy_tensor(view: View, device: torch.device) -> LazyTensor:
    """Make a lazy tensor."""
    meta = view.meta
    made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 (the documented way to make one)
        LazyTensor,
        meta.size(),
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        device=device,
    )
    set_view(made, view)
    return made


def view_of(tensor: LazyTensor) -> View:
    """Return the view of a lazy tensor."""
    return tensor._view  # noqa: SLF001 (next to its class)  # pyright: ignore[reportPrivateUsage]


def set_view(tensor: LazyTensor, view: View) -> None:
    """Set the view of a lazy tensor."""
    tensor._view, tensor._owner = view, view.recipe.owner()  # noqa: SLF001 (next to its class)  # pyright: ignore[reportPrivateUsage]
