# pyright: reportUnknownMemberType=false
"""Building models without memory for them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossal._src.lazy.pretrained import FromPretrainedPatch
from colossal._src.lazy.tensor import LazyTensor, record
from colossal.errors import UnsupportedError
from colossal.logging import get_dist_logger


def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
    """Give a module values, in place: each tensor stays the object that it is, for optimizers and tied modules.

    Args:
        module: Built inside of `LazyInitContext`, or in part.
        verbose: Log how many tensors were made, and their bytes.

    Returns:
        The module itself.

    Example:
        >>> import torch
        >>> from colossal.lazy import LazyInitContext, materialize
        >>> with LazyInitContext():
        ...     model = torch.nn.LayerNorm(2)
        >>> materialize(model).weight
        Parameter containing:
        tensor([1., 1.], requires_grad=True)
    """
    lazy = list({id(each): each for each in lazy_tensors(module)}.values())
    recurrent = [
        each for each in module.modules() if isinstance(each, nn.RNNBase) and next(lazy_tensors(each), None) is not None
    ]
    for each in recurrent:
        each._flat_weight_refs = []  # noqa: SLF001 (weak references, with which torch does not swap tensors)  # pyright: ignore[reportPrivateUsage]
    for each in lazy:
        each.materialize()
    for each in recurrent:
        each._init_flat_weights()  # noqa: SLF001 (torch's own way to make them again)  # pyright: ignore[reportPrivateUsage]
    if verbose:
        num_bytes = sum(each.nbytes for each in lazy)
        get_dist_logger().info(f"materialized {len(lazy)} tensors of {num_bytes} bytes")
    return module


def lazy_tensors(module: nn.Module) -> Iterator[LazyTensor]:
    """Find the lazy tensors of a module and of those in it: parameters, buffers and plain attributes.

    Args:
        module: Any module.

    Yields:
        Each at least once.

    Example:
        >>> import torch
        >>> from colossal.lazy import LazyInitContext, lazy_tensors
        >>> with LazyInitContext():
        ...     model = torch.nn.Linear(2, 3)
        >>> [tuple(each.shape) for each in lazy_tensors(model)]
        [(3, 2), (3,)]
    """
    for each in module.modules():
        held: list[Any] = [value for name, value in vars(each).items() if name != "_modules"]
        yield from (leaf for leaf in tree_leaves(held) if isinstance(leaf, LazyTensor))


@final
class LazyInitContext:
    """Modules that are built inside take no memory, until they are materialized.

    Every operation on their parameters and buffers is recorded with the state of the random generator that it
    draws from, and runs later, bit for bit as it would have run at once, in whatever order parameters are needed.
    After the context the generators have the state that they would have without it.

    Weights that `from_pretrained` of transformers loads inside stay in their safetensors files. Each is read when it is
    materialized, alone, and converted as it would have been at once.

    Args:
        tensor_cls: `LazyTensor`; there is no other.
        default_device: The device of tensors that are created without one.

    Raises:
        UnsupportedError: `tensor_cls` is another class.

    Example:
        >>> import torch
        >>> from colossal.lazy import LazyInitContext
        >>> with LazyInitContext():
        ...     model = torch.nn.Linear(2, 3)
        >>> model.weight
        LazyTensor(shape=(3, 2), dtype=torch.float32, device='cpu')
        >>> LazyInitContext.materialize(model)(torch.zeros(1, 2)).shape
        torch.Size([1, 3])
    """

    def __init__(
        self, tensor_cls: type[LazyTensor] = LazyTensor, default_device: torch.device | str | None = None
    ) -> None:
        if tensor_cls is not LazyTensor:
            raise UnsupportedError(
                f"LazyInitContext makes tensors of the class LazyTensor. Found tensor_cls={tensor_cls!r}. Leave it out."
            )
        self._device = default_device
        self._open: list[tuple[ExitStack, _Recording]] = []

    def __enter__(self) -> Self:
        """Begin to write down what is built."""
        stack, recording = ExitStack(), _Recording()
        if self._device is not None:
            stack.enter_context(torch.device(self._device))
        stack.callback(recording.leave)
        stack.enter_context(recording)
        self._open.append((stack, recording))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it.

        Raises:
            UnsupportedError: An operation was rejected, and its caller went on without its result.
        """
        stack, recording = self._open.pop()
        stack.close()
        if error is None and recording.refusal is not None:
            raise recording.refusal

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Materialize all tensors of a module, in place.

        Args:
            module: Built inside of a context, or in part.
            verbose: Log how many tensors were made, and their bytes.

        Returns:
            The module itself.
        """
        return materialize(module, verbose)


@final
class _Recording(TorchDispatchMode):
    """Sees every operation of torch while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: UnsupportedError | None = None
        self._leave_detour: Callable[[], None] | None = None

    def leave(self) -> None:
        """Leave transformers as it was."""
        if self._leave_detour is not None:
            self._leave_detour()
            self._leave_detour = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._leave_detour = self._leave_detour or FromPretrainedPatch.enter()  # transformers may be imported inside
        try:
            return record(func, args, kwargs or {})
        except UnsupportedError as error:
            self.refusal = error
            raise
