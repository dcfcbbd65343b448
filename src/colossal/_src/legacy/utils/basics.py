"""Small helpers of the older API: devices, contexts, seeds, tensors."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from colossal.accelerator import get_accelerator, get_current_device
from colossal.logging import DistributedLogger

_T = TypeVar("_T")


def print_rank_0(msg: object, logger: DistributedLogger | None = None) -> None:
    """Print or log a message on the first rank.

    Args:
        msg: The message.
        logger: Log by it instead of printing.

    Example:
        >>> from colossal.legacy.utils import print_rank_0
        >>> print_rank_0("step 3")
        step 3
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if logger is None:
        print(msg, flush=True)  # noqa: T201 (its documented purpose)
    else:
        logger.info(str(msg))


def synchronize() -> None:
    """Wait until everything that was started on the device has finished.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import get_current_device, synchronize
        >>> product = torch.ones(2, 2, device=get_current_device()) @ torch.ones(2, device=get_current_device())
        >>> synchronize()
        >>> product.tolist()
        [2.0, 2.0]
    """
    get_accelerator().synchronize()


def empty_cache() -> None:
    """Give memory that torch holds in reserve back to the device.

    Example:
        >>> from colossal.legacy.utils import empty_cache
        >>> empty_cache() is None
        True
    """
    get_accelerator().empty_cache()


def set_to_cuda(models: Any) -> Any:
    """Move a model, a tensor, or several of them to the current device, whatever its type.

    Args:
        models: A module, a tensor, or a list or tuple of such.

    Returns:
        The same, on the device; several in a list or tuple of the same kind.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import set_to_cuda
        >>> [model] = set_to_cuda([torch.nn.Linear(2, 1)])
        >>> model.weight.device.type in ("cpu", torch._C._get_accelerator().type)
        True
    """
    if isinstance(models, list | tuple) and len(models) > 0:
        return type(models)(set_to_cuda(each) for each in models)
    if isinstance(models, nn.Module | torch.Tensor):
        return models.to(get_current_device())
    return models


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, the latter on the CPU and on the device.

    Args:
        seed: Any integer from 0 to 2**32 - 1.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import set_seed
        >>> set_seed(3)
        >>> first = torch.rand(1)
        >>> set_seed(3)
        >>> torch.equal(torch.rand(1), first)
        True
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (programs draw from the generator that they find)
    get_accelerator().manual_seed(seed)


@contextmanager
def conditional_context(context_manager: AbstractContextManager[_T], enable: bool = True) -> Iterator[_T | None]:
    """Enter a context if a condition holds.

    Args:
        context_manager: The context.
        enable: The condition.

    Yields:
        What the context yields; None if it is not entered.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import conditional_context
        >>> with conditional_context(torch.no_grad(), enable=False):
        ...     torch.is_grad_enabled()
        True
    """
    if enable:
        with context_manager as entered:
            yield entered
    else:
        yield None


def disposable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that does its work at the first call only.

    Args:
        func: The function.

    Returns:
        A function that calls `func` once, and returns None after that.

    Example:
        >>> from colossal.legacy.utils import disposable
        >>> greet = disposable(lambda: print("once"))
        >>> greet(), greet()
        once
        (None, None)
    """
    is_done = False

    @wraps(func)
    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_done
        if is_done:
            return None
        is_done = True
        return func(*args, **kwargs)

    return once


def ensure_path_exists(filename: str | Path) -> None:
    """Create the folder of a file that is about to be written.

    Args:
        filename: Path of the file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from colossal.legacy.utils import ensure_path_exists
        >>> path = Path(tempfile.mkdtemp(), "logs", "run.txt")
        >>> ensure_path_exists(path)
        >>> path.parent.is_dir(), path.exists()
        (True, False)
    """
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def free_storage(data: torch.Tensor) -> None:
    """Free the memory of a tensor, and keep its shape.

    Args:
        data: A tensor that begins at the start of its memory.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import free_storage
        >>> tensor = torch.ones(3)
        >>> free_storage(tensor)
        >>> tensor.shape, tensor.untyped_storage().nbytes()
        (torch.Size([3]), 0)
    """
    assert data.storage_offset() == 0, "the memory belongs to another tensor"
    data.untyped_storage().resize_(0)


def is_ddp_ignored(p: torch.Tensor) -> bool:
    """Return whether a parameter is marked to be left out by data parallelism.

    Args:
        p: A parameter; the mark is its attribute ``_ddp_to_ignore``.

    Returns:
        Whether it is marked.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import is_ddp_ignored
        >>> is_ddp_ignored(torch.nn.Parameter(torch.ones(2)))
        False
    """
    return bool(getattr(p, "_ddp_to_ignore", False))


def get_non_persistent_buffers_set(
    module: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> set[str]:
    """List the buffers of a module that its state dict leaves out.

    Args:
        module: The module.
        memo: Modules that are left out; those that are listed are added.
        prefix: In front of the names, with a dot.
        remove_duplicate: List a module that has several names once.

    Returns:
        Their full names.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import get_non_persistent_buffers_set
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> model[0].register_buffer("mask", torch.ones(2), persistent=False)
        >>> get_non_persistent_buffers_set(model)
        {'0.mask'}
    """
    return {
        f"{path}.{name}" if path else name
        for path, each in module.named_modules(memo, prefix, remove_duplicate)
        for name in each._non_persistent_buffers_set  # noqa: SLF001 (it has no public name)
    }


def is_compatible_with_meta() -> bool:
    """Tell whether models can be built on the meta device: with each version of torch that is supported."""
    return True


@final
class MultiTensorApply:
    """Calls operators that work on lists of tensors in blocks of a size.

    Args:
        chunk_size: Number of elements of a block.

    Example:
        >>> from colossal.legacy.utils import MultiTensorApply
        >>> MultiTensorApply(65536)(lambda size, flag, lists, factor: (size, flag, lists, factor), None, [[]], 3)
        (65536, None, [[]], 3)
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., _T], noop_flag_buffer: Any, tensor_lists: Sequence[Sequence[torch.Tensor]], *args: Any
    ) -> _T:
        """Call an operator.

        Args:
            op: Takes the size of a block, the flag, the lists and the rest.
            noop_flag_buffer: Where the operator notes an overflow.
            tensor_lists: Lists of tensors of equal length.
            *args: Passed to the operator.

        Returns:
            What the operator returns.
        """
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""Calls an operator on lists of tensors in blocks of 65536 elements."""
