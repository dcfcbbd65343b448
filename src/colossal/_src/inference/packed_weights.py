"""Weights of linear layers in the order in which a processor multiplies them.

[Note: packed weights]
A product of a few rows takes as long as it takes to read the weight, and a weight in rows is read in an order that
processors do not foresee, or made into blocks anew for each product. A model that an engine has loaded is multiplied by
the same weights for as long as it serves, so its weights are packed once, one after the other, and nothing else is
kept. In float32 they become panels of our own. In bfloat16 they become blocks of oneDNN, which multiplies many rows
best; of shapes of which the blocks are panels as well, our own code multiplies few rows.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from colossal._src.kernel import has_packed_product, packed_product, to_panels, to_rows
from colossal._src.nn.layer import Linear, Linear1D_Col, Linear1D_Row
from colossal.errors import UnsupportedError

_PARALLEL = (Linear, Linear1D_Col, Linear1D_Row)
_FEW_ROWS = 16
"""Rows of the inputs up to which our own code is faster in bfloat16; blocks of oneDNN are chosen for as many."""


def packs_weights(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies by packed weights faster."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 (an operator that inductor uses too)
    return has_packed_product(dtype)


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of the linear layers of a model that nobody else uses, where that makes products faster.

    This is on CPUs, in float32 and bfloat16. A weight that is also that of an embedding stays there as it is.
    """
    for module in model.modules():
        # a class with a forward of its own may use its weight in another way
        if isinstance(module, _PARALLEL) or getattr(type(module), "forward", None) is nn.Linear.forward:
            weight: Any = module.weight
            if weight.device.type == "cpu" and packs_weights(weight.dtype) and weight.numel():
                packed: Any = PackedWeight(weight)
                module.weight = packed


@final
class _Panels:
    """A weight in float32 for our own code."""

    dtype = torch.float32

    def __init__(self, weight: torch.Tensor) -> None:
        self._values, self._outputs = to_panels(weight), len(weight)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return packed_product(x, self._values.data_ptr(), self._outputs, bias)

    def to_rows(self) -> torch.Tensor:
        return to_rows(self._values, self._outputs)


@final
class _Blocks:
    """A weight in bfloat16 for oneDNN, and for our own code if it can read the blocks."""

    dtype = torch.bfloat16

    def __init__(self, weight: torch.Tensor) -> None:
        self._values, self._outputs = _blocks_of(weight), len(weight)
        self._address = torch.ops.mkldnn.data_ptr(self._values) if _are_panels(*weight.shape) else None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._address is not None and x.numel() <= _FEW_ROWS * x.shape[-1]:
            return packed_product(x, self._address, self._outputs, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._values, bias, "none", [], "")  # noqa: SLF001 (as above)

    def to_rows(self) -> torch.Tensor:
        return self._values.to_dense()


def _blocks_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _FEW_ROWS)  # noqa: SLF001 (as above)


@cache
def _are_panels(outputs: int, inputs: int) -> bool:
    """Whether the blocks that oneDNN makes of a shape are the panels that our own code reads; it may choose others."""
    if inputs % 32 or not has_packed_product(torch.bfloat16):
        return False
    weight = torch.arange(outputs * inputs, dtype=torch.int16, device="cpu").view(torch.bfloat16).view(outputs, inputs)
    blocks, panels = _blocks_of(weight), to_panels(weight).view(torch.int16)
    if torch.ops.mkldnn._nbytes(blocks) != panels.nbytes:  # noqa: SLF001 (as above)
        return False
    memory = (ctypes.c_char * panels.nbytes).from_address(torch.ops.mkldnn.data_ptr(blocks))
    return torch.frombuffer(memory, dtype=torch.int16).equal(panels.flatten())


@final
class PackedWeight(torch.Tensor):
    """A weight, (out, in), as `torch.nn.functional.linear` multiplies by it; all else sees a copy of it in rows."""

    packed: _Panels | _Blocks
    _is_param = True
    """By which nn.Parameter is known, whose constructor would make rows again."""

    @staticmethod
    def __new__(cls: type["PackedWeight"], weight: torch.Tensor) -> "PackedWeight":
        """Make a tensor without storage of its own."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)  # noqa: SLF001 (torch's documented way)
        made.packed = (_Blocks if weight.dtype == torch.bfloat16 else _Panels)(weight.detach())
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Multiply inputs by what is packed; gradients of the inputs, and autocast, need rows."""
        if func is functional.linear and not kwargs and not torch.is_autocast_enabled("cpu"):
            x, weight, bias, *_ = *args, None
            # of the panels, as a dtype asked of this tensor comes here once more
            is_used = isinstance(weight, PackedWeight) and x.dtype == weight.packed.dtype and x.numel() > 0
            if is_used and not (torch.is_grad_enabled() and x.requires_grad):
                return weight.packed.multiply(x, bias)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (what it returns is not packed)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with rows; what is written to them would be lost."""
        if func._schema.is_mutable:  # noqa: SLF001 (torch has no public name for it)
            raise UnsupportedError(
                "The weights of a model that an engine has loaded are packed for its processor, and read only. Found "
                f"{func}. Load the model by from_pretrained, change it, and pass it to the engine."
            )
        in_rows = tree_map_only(PackedWeight, lambda weight: weight.packed.to_rows(), (args, dict(kwargs or {})))
        return func(*in_rows[0], **in_rows[1])
