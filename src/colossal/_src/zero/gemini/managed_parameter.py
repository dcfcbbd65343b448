"""Parameters whose values are fetched when an operation reads them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final
from weakref import ref

import torch
from torch import nn

from colossal._src.interface import WorkingParameter
from colossal._src.tensor import operators_of
from colossal.errors import UnsupportedError

_FETCHER_ATTR = "_colossal_reader"

# [Note: what reads] These describe a parameter without reading its values, or belong to its gradient.
_PROPERTIES = (
    "shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "names", "itemsize", "nbytes", "_version", "_base", "is_nested", "name",
    "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_grad", "is_mps", "is_xpu", "is_mkldnn",
    "output_nr", "is_sparse_csr", "volatile", "_python_dispatch",
)  # fmt: skip
_METHODS = (
    "dim", "size", "numel", "nelement", "element_size", "ndimension", "is_floating_point", "is_complex", "is_signed",
    "is_contiguous", "stride", "storage_offset", "get_device", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "retain_grad", "is_inference", "is_shared", "__len__", "__hash__", "__format__", "type",
    "dense_dim", "is_conj", "is_neg", "is_pinned", "has_names", "is_same_size",
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
)  # fmt: skip
_FUNCTIONS = (
    "is_floating_point", "is_complex", "numel", "is_tensor", "is_same_size",
    "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like",
)  # fmt: skip


def _metadata_functions() -> frozenset[Any]:
    found: list[Any] = [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    found += [getattr(torch, name) for name in _FUNCTIONS]
    for name in _PROPERTIES:
        descriptor = getattr(torch.Tensor, name, None)
        found += [
            getattr(descriptor, verb) for verb in ("__get__", "__set__", "__delete__") if hasattr(descriptor, verb)
        ]
    return frozenset(found)


_METADATA_FUNCTIONS = _metadata_functions()


class ParameterFetcher(Protocol):
    """What has the values of parameters."""

    def run_with_full(self, parameters: Sequence[nn.Parameter], call: Callable[[], Any]) -> Any:
        """Make a call that reads parameters."""
        ...


@final
class ManagedParameter(WorkingParameter):
    """A parameter whose values are elsewhere between its uses.

    Each operation that takes one of these asks its `ParameterFetcher` for the values first; so it does not matter which
    module uses it, or how often. What it returns are plain tensors, unless the parameter has operators of its own.
    """

    is_view = True  # of a chunk

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Have the values fetched, then run an operation of torch as if its parameters were plain ones."""
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (public only as a mode of all threads)
            if func in _METADATA_FUNCTIONS:
                return func(*args, **named)
            found = _managed((*args, *named.values()))
            operators = next((own for each in found if (own := operators_of(each)) is not None), None)
            return _run(func, args, named) if operators is None else operators(func, args, named, _run)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe it without its values."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return f"Parameter of {tuple(self.shape)} in {self.dtype} on {self.device}, whose values are in a chunk"


def manage_parameters(parameters: Iterable[nn.Parameter], reader: ParameterFetcher) -> None:
    """Let parameters ask for their values from now on, as long as somebody else keeps what has them."""
    for parameter in parameters:
        # weak, as the chunks there hold the parameters
        setattr(parameter, _FETCHER_ATTR, ref(reader))
        # in place: tied layers and the user's optimizer refer to this object
        parameter.__class__ = ManagedParameter


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the values of parameters, if there are any among its arguments."""
    found = list(_managed((*args, *kwargs.values())))
    if not found:
        return func(*args, **kwargs)
    reader: ParameterFetcher | None = getattr(found[0], _FETCHER_ATTR)()
    if reader is None:
        raise UnsupportedError(
            "The wrapped model has the values of its parameters. Found an operation that reads one after that model "
            "was freed. Keep what boost returned, and take what it computes from there."
        )
    return reader.run_with_full(found, lambda: func(*args, **kwargs))


def _managed(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if type(value) is ManagedParameter:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _managed(value)
        elif isinstance(value, dict):
            yield from _managed(value.values())
