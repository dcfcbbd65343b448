# pyright: reportUnknownMemberType=false
"""Building models without memory for them."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from colossal._src.lazy.materialize import materialize
from colossal._src.lazy.pretrained import FromPretrainedPatch
from colossal._src.lazy.recorder import record
from colossal._src.lazy.tensor import LazyTensor
from colossal.errors import UnsupportedError


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
