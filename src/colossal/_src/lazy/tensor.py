# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A tensor that knows how its values come about, and has none yet."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

from colossal._src.lazy.operators import (
    ALIASING,
    SHAPE_ONLY,
    aliases_arguments,
    makes_tensor,
    needs_values,
    refusal_of,
    written_arguments,
)
from colossal._src.lazy.recipe import Constant, Owner, RandomDraw, Recipe, RecordedOperation, View, is_random
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
        # inside of a context, what makes the values would be recorded instead of run
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
        from colossal._src.lazy.stored_tensor import read_range

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
        from colossal._src.lazy.stored_tensor import read_shard, reader_of
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
        # `data` exchanges what torch has of a tensor, and not its attributes in Python
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


_META, _CPU = torch.device("meta"), torch.device("cpu")


def record(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write an operation down, and return what stands for its results."""
    seen = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    lazy = [value for value in seen if isinstance(value, LazyTensor)]
    makes = (
        makes_tensor(func) if not seen else func in SHAPE_ONLY and seen[0].is_meta and kwargs.get("device") is not None
    )
    if kwargs.get("device") == _META:
        args, kwargs = tree_map(_lazy_on_meta, (args, kwargs))
        return func(*args, **kwargs)
    # torch copies a storage, as of a tensor with values in copy.deepcopy, by a tensor of bytes that it sets to it
    sets_storage = func is _aten.empty.memory_format and list(args[0]) == [0] and kwargs.get("dtype") is torch.uint8
    if sets_storage or not (lazy or makes):
        return func(*args, **kwargs)
    with _disable_current_modes():  # those of contexts around this one
        if func is _aten.set_.source_Tensor and _have_same_layout(*seen):
            set_view(args[0], view_of(args[1]))
            return args[0]
        if func in ALIASING:
            return _record_alias(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise refusal_of(func, "it changes the shape of a tensor in place")
        written = list(written_arguments(func, args, kwargs))
        if any(not isinstance(value, LazyTensor) for value in written) or needs_values(func):
            if any(isinstance(value, LazyTensor) for value in written):
                raise refusal_of(func, "it writes to lazy tensors what has to be known now")
            return _run_now(func, args, kwargs)
        if makes:
            kwargs = {"device": _CPU, **kwargs}
        return _record_operation(func, args, kwargs, torch.device(kwargs.get("device") or lazy[0].device))


def _record_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    draw = RandomDraw(device, generator) if is_random(func) else None
    stored_args, stored_kwargs = tree_unflatten([_stored(leaf) for leaf in leaves], structure)
    results = _shapes_of(func, args, kwargs, draw)
    lazy = [(leaf, view_of(leaf).meta) for leaf in leaves if isinstance(leaf, LazyTensor)]
    if any(leaf.size() != meta.size() for leaf, meta in lazy):
        raise refusal_of(func, "it gives a tensor another size in place")
    touched = dict.fromkeys(
        view_of(each).recipe for each in written_arguments(func, args, kwargs) if isinstance(each, LazyTensor)
    )
    operation = RecordedOperation(func, stored_args, stored_kwargs, list(touched), draw)
    wrapped = _wrapped(operation, tree_leaves(results), lazy, device)
    for recipe in operation.writes():
        recipe.writes.append(operation)
    if draw is not None and not draw.skip(func, tree_leaves(results)[0]):
        operation.run_and_discard()
    return tree_unflatten(wrapped, tree_structure(results))


def _wrapped(
    operation: RecordedOperation,
    results: Sequence[Any],
    lazy: Sequence[tuple[LazyTensor, torch.Tensor]],
    device: torch.device,
) -> list[Any]:
    """Wrap results as lazy tensors; unknown storages were made by the operation."""
    recipes = {_place(meta): view_of(leaf).recipe for leaf, meta in lazy}
    wrapped: list[Any] = []
    for number, result in enumerate(results):
        same = next((leaf for leaf, meta in lazy if meta is result), None)
        if same is None and isinstance(result, torch.Tensor):
            if _place(result) not in recipes:
                recipe = recipes[_place(result)] = Recipe(result.untyped_storage().nbytes(), device)
                operation.made[number] = View(recipe, result)
            same = make_lazy_tensor(View(recipes[_place(result)], result), device)
        wrapped.append(result if same is None else same)
    return wrapped


def _run_now(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation with values; those made only for `torch.equal` are released, as for weights before tying."""
    lazy = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor)]
    recipes = {view_of(leaf).recipe for leaf in lazy if func is _aten.equal.default}
    fresh = [recipe for recipe in recipes if not recipe.has_kept]
    args, kwargs = tree_map(_with_values, (tuple(args), dict(kwargs)))
    result = func(*args, **kwargs)
    for recipe in fresh:
        recipe.forget()
    return result


def _record_alias(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LazyTensor:
    """Let a tensor see the same storage in another shape, in place."""
    lazy, *rest = args
    view = view_of(lazy)
    set_view(lazy, View(view.recipe, func(view.meta.detach(), *rest, **kwargs)))
    with no_dispatch():
        func(*args, **kwargs)
    return lazy


def _have_same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a tensor can replace another: same sizes, strides and dtype, as far as they are known."""
    if not (isinstance(first, LazyTensor) and isinstance(second, LazyTensor)):
        return False
    layouts = [
        (each.size(), each.stride(), each.storage_offset(), each.dtype, each.is_conj(), each.is_neg())
        for each in (view_of(first).meta, view_of(second).meta)
    ]
    return layouts[0] == layouts[1] and first.device == second.device


def _shapes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], draw: RandomDraw | None) -> Any:
    """Run an operation on meta tensors, or with values where torch cannot, only to get the shapes of results."""
    try:
        return func(*tree_map(_on_meta, tuple(args)), **tree_map(_on_meta, dict(kwargs)))
    except NotImplementedError as error:
        if aliases_arguments(func):
            raise refusal_of(func, "torch cannot compute the shape of its result without running it") from error
    args, kwargs = tree_map(_with_values, (tuple(args), dict(kwargs)))
    with torch.no_grad(), draw.again() if draw is not None else nullcontext():
        return tree_map(_on_meta, func(*args, **kwargs))


def _lazy_on_meta(leaf: Any) -> Any:
    return _on_meta(leaf) if isinstance(leaf, LazyTensor) else leaf


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, LazyTensor):
        return view_of(leaf).meta
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
    if isinstance(leaf, torch.Generator):
        return None
    return _META if isinstance(leaf, torch.device) else leaf


def _stored(leaf: Any) -> Any:
    if isinstance(leaf, LazyTensor):
        return view_of(leaf)
    return Constant.of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _with_values(leaf: Any) -> Any:
    return leaf.values() if isinstance(leaf, LazyTensor) else leaf


def _place(meta: torch.Tensor) -> int:
    """Return an identity of a storage: those on the meta device have no addresses."""
    return meta.untyped_storage()._cdata  # noqa: SLF001 (it has no public name)  # pyright: ignore[reportPrivateUsage]
