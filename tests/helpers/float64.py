"""Models of Hugging Face that compute in float64 throughout, so that comparisons need no room for rounding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CASTS = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.type}
_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


class KeepFloat64(TorchFunctionMode):
    """Leaves float64 tensors as they are where a model casts them to float32.

    Norms, softmax and rotary embeddings of transformers do so, which is meant for half precision. In float64 it rounds,
    and by how much depends on the vector width of the processor and on how many rows a rank has.
    """

    def __torch_function__(
        self, func: Callable[..., Any], _types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, without a cast from float64 to float32."""
        kwargs = kwargs or {}
        if func in _CASTS or kwargs.get("dtype") is torch.float32:
            if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
                kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
                if func is torch.Tensor.float:
                    return args[0]
        elif func in _PRODUCTS and {each.dtype for each in args} == {torch.float64, torch.float32}:
            args = tuple(each.double() for each in args)  # frequencies by numbers of tokens, in transformers 5.17
        return func(*args, **kwargs)
