"""A layer that is described, and built when its stage needs it."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn


@final
class LayerSpec:
    """What a layer is built from: its class and arguments, among which may be other specs.

    Args:
        typename: The class, or a function that makes the layer.
        *module_args: Its arguments.
        **module_kwargs: Its keywords.

    Attributes:
        typename: The class.
        children: Specs of the layers that it contains, given by `set_children`; None without any.

    Example:
        >>> import torch
        >>> from colossal.legacy.pipeline import LayerSpec
        >>> spec = LayerSpec(torch.nn.Linear, 4, 2, bias=False)
        >>> spec.count_params()
        >>> spec.param_count, spec.build()
        (8, Linear(in_features=4, out_features=2, bias=False))
    """

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename = typename
        self.children: tuple[LayerSpec, ...] | None = None
        self._args, self._kwargs, self._param_count = module_args, module_kwargs, 0

    def __repr__(self) -> str:
        arguments = [*map(repr, self._args), *(f"{name}={value!r}" for name, value in self._kwargs.items())]
        return f"LayerSpec({getattr(self.typename, '__name__', self.typename)}, {', '.join(arguments)})"

    @property
    def param_count(self) -> int:
        """The number of elements that `count_params` found."""
        return self._param_count

    def build(self) -> nn.Module:
        """Build the layer.

        Returns:
            A new module; with `set_children`, of the children, which are its positional arguments.
        """
        args = self._args if self.children is None else self.children
        built = {name: _build(value) for name, value in self._kwargs.items()}
        return self.typename(*map(_build, args), **built)

    def set_children(self, children: Sequence["LayerSpec"]) -> None:
        """Describe the layers of a container, such as a `torch.nn.Sequential`, in the place of its arguments.

        Args:
            children: Their specs, in order.
        """
        self.children = tuple(children)

    def count_params(self) -> None:
        """Count the elements of the layer's parameters, on the meta device; the result is `param_count`."""
        with torch.device("meta"):
            self._param_count = sum(parameter.numel() for parameter in self.build().parameters())

    def reset_param_count(self) -> None:
        """Forget what `count_params` found."""
        self._param_count = 0


def _build(value: Any) -> Any:
    return value.build() if isinstance(value, LayerSpec) else value
