"""Weights of linear layers in the order in which a processor multiplies them.

[Note: packed weights]
oneDNN multiplies numbers in bfloat16 by blocks of a weight, which do not lie in its rows. Of a weight in rows each
product makes these blocks anew, which takes about as long as to multiply a few tokens by them. A model that an engine
has loaded is multiplied by the same weights for as long as it serves, so its weights become blocks once, one after the
other, and nothing else is kept. Products of numbers in float32 gain less, and lose where there is one token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from colossal._src.nn.layer import Linear, Linear1D_Col, Linear1D_Row
from colossal.errors import UnsupportedError

_PARALLEL = (Linear, Linear1D_Col, Linear1D_Row)
_ROWS = 16
"""Rows of the inputs for which blocks are chosen, also those of other inputs."""


def packs_weights() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 (an operator that inductor uses too)


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of the linear layers of a model that nobody else uses, where that makes products faster.

    This is on CPUs, in bfloat16. A weight that is also that of an embedding stays there as it is.
    """
    if not packs_weights():
        return
    for module in model.modules():
        # a class with a forward of its own may use its weight in another way
        if isinstance(module, _PARALLEL) or getattr(type(module), "forward", None) is nn.Linear.forward:
            weight: Any = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.numel():
                packed: Any = PackedWeight(weight)
                module.weight = packed


@final
class PackedWeight(torch.Tensor):
    """A weight, (out, in), as `torch.nn.functional.linear` multiplies by it; all else sees a copy of it in rows."""

    blocks: torch.Tensor
    _is_param = True
    """By which nn.Parameter is known, whose constructor would make rows again."""

    @staticmethod
    def __new__(cls: type["PackedWeight"], weight: torch.Tensor) -> "PackedWeight":
        """Make a tensor without storage of its own."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)  # noqa: SLF001 (torch's documented way)
        made.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)  # noqa: SLF001 (as above)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Multiply inputs by blocks; gradients of the inputs need rows."""
        if func is functional.linear and not kwargs:
            x, weight, bias, *_ = *args, None
            is_used = isinstance(weight, PackedWeight) and x.dtype == torch.bfloat16 and x.numel() > 0
            if is_used and not (torch.is_grad_enabled() and x.requires_grad):
                return torch.ops.mkldnn._linear_pointwise(x, weight.blocks, bias, "none", [], "")  # noqa: SLF001 (as above)
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
        in_rows = tree_map_only(PackedWeight, lambda weight: weight.blocks.to_dense(), (args, dict(kwargs or {})))
        return func(*in_rows[0], **in_rows[1])
