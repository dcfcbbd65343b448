"""Autocast on the meta device, for which torch has none."""

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Self, final

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm")
_IN_HALF = [
    *((functional, name) for name in ("linear", "scaled_dot_product_attention", *_CONVOLUTIONS)),
    *((torch, name) for name in ("einsum", *_CONVOLUTIONS, *_PRODUCTS)),
    *((torch.Tensor, name) for name in ("__matmul__", *_PRODUCTS)),
]


@final
class MetaAutocast:
    """Casts what products of matrices take, and losses, as `torch.autocast` does on other devices.

    It takes the place of functions while it is open, rather than being a mode: a backward pass that computes
    activations again has no modes of functions.

    Args:
        dtype: What products are computed in, bfloat16 or float16; None casts nothing.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        casts = [*((*each, dtype) for each in _IN_HALF), (functional, "cross_entropy", torch.float32)]
        self._casts = casts if dtype is not None else []
        self._replaced: list[tuple[Any, str, Any]] = []
        self._weights: dict[torch.Tensor, torch.Tensor] = {}

    def __enter__(self) -> Self:
        for owner, name, dtype in self._casts:
            own = getattr(owner, name)
            self._replaced.append((owner, name, own))
            setattr(owner, name, self._casting(own, dtype))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())
        self.forget_weights()

    def forget_weights(self) -> None:
        """Let go of weights in half precision at the end of a pass; the graph has those that a backward pass needs."""
        self._weights.clear()

    def _casting(self, function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
        @wraps(function)
        def cast_and_call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(lambda leaf: self._cast(leaf, dtype), (args, kwargs))
            return function(*args, **kwargs)

        return cast_and_call

    def _cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype == torch.float64:
            return leaf
        if not (leaf.is_leaf and leaf.requires_grad):
            return leaf.to(dtype)
        if leaf not in self._weights:
            self._weights[leaf] = leaf.to(dtype)
        return self._weights[leaf]
