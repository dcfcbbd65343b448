"""Messages between adjacent stages of a pipeline: tensors, lists of them, and other objects."""

from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.legacy.context import ParallelMode, global_context
from colossal._src.legacy.pipeline import PipelineP2PCommunication

_PIPELINE = ParallelMode.PIPELINE
_LINKS: WeakKeyDictionary[ParallelMesh, PipelineP2PCommunication] = WeakKeyDictionary()


@final
class _Neighbors:
    """The ranks of the pipeline that this one is in, as the mesh has them."""

    def get_rank(self) -> int:
        return global_context.get_global_rank()

    def get_ranks(self) -> list[int]:
        return global_context.get_ranks_in_group(_PIPELINE)

    def get_prev_rank(self) -> int:
        return global_context.get_prev_global_rank(_PIPELINE)

    def get_next_rank(self) -> int:
        return global_context.get_next_global_rank(_PIPELINE)


def send_forward(output_tensor: Any, next_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send to the next stage; the last one sends nothing.

    Args:
        output_tensor: A tensor, a list of them, or another object of `PipelineP2PCommunication`.
        next_rank: The global rank; that of the next stage by default.
        scatter_gather_tensors: Accepted for programs that pass it.

    Communication: broadcast, pp, the bytes of the tensors.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import recv_forward, send_forward
        >>> from colossal.legacy.context import global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.load_config({"parallel": {"pipeline": 2}})
        ...     global_context.init_parallel_groups()
        ...     received = recv_forward((2,))
        ...     send_forward(torch.ones(2))
        ...     return received
        >>> run_threads(program, 2)
        [None, tensor([1., 1.])]
    """
    del scatter_gather_tensors
    if not global_context.is_pipeline_last_stage():
        _link().send_forward(output_tensor, next_rank)


def send_backward(input_tensor_grad: Any, prev_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send to the stage before; the first one sends nothing.

    Args:
        input_tensor_grad: As of `send_forward`.
        prev_rank: The global rank; that of the stage before by default.
        scatter_gather_tensors: Accepted for programs that pass it.

    Communication: broadcast, pp, the bytes of the tensors.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import recv_backward, send_backward
        >>> from colossal.legacy.context import global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.load_config({"parallel": {"pipeline": 2}})
        ...     global_context.init_parallel_groups()
        ...     received = recv_backward()
        ...     send_backward(torch.ones(2))
        ...     return received
        >>> run_threads(program, 2)
        [tensor([1., 1.]), None]
    """
    del scatter_gather_tensors
    if not global_context.is_pipeline_first_stage():
        _link().send_backward(input_tensor_grad, prev_rank)


def recv_forward(
    input_tensor_shape: Any = None,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Receive from the stage before.

    Args:
        input_tensor_shape: Not needed: a message says what it is.
        prev_rank: The global rank; that of the stage before by default.
        dtype: Not needed.
        scatter_gather_tensors: Accepted for programs that pass it.

    Returns:
        What was sent; None on the first stage.

    Communication: broadcast, pp, the bytes of the tensors.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import recv_forward, send_forward
        >>> from colossal.legacy.context import global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.load_config({"parallel": {"pipeline": 2}})
        ...     global_context.init_parallel_groups()
        ...     received = recv_forward()
        ...     send_forward(torch.ones(2))
        ...     return received
        >>> run_threads(program, 2)
        [None, tensor([1., 1.])]
    """
    del input_tensor_shape, dtype, scatter_gather_tensors
    return None if global_context.is_pipeline_first_stage() else _link().recv_forward(prev_rank)[0]


def recv_backward(
    output_grad_shape: Any = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Receive from the next stage.

    Args:
        output_grad_shape: Not needed: a message says what it is.
        next_rank: The global rank; that of the next stage by default.
        dtype: Not needed.
        scatter_gather_tensors: Accepted for programs that pass it.

    Returns:
        What was sent; None on the last stage.

    Communication: broadcast, pp, the bytes of the tensors.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import recv_backward, send_backward
        >>> from colossal.legacy.context import global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.load_config({"parallel": {"pipeline": 2}})
        ...     global_context.init_parallel_groups()
        ...     received = recv_backward()
        ...     send_backward(torch.ones(2))
        ...     return received
        >>> run_threads(program, 2)
        [tensor([1., 1.]), None]
    """
    del output_grad_shape, dtype, scatter_gather_tensors
    return None if global_context.is_pipeline_last_stage() else _link().recv_backward(next_rank)[0]


def send_forward_recv_backward(
    output_tensor: Any,
    output_grad_shape: Any = None,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Send to the next stage, and receive from it.

    Args:
        output_tensor: As of `send_forward`.
        output_grad_shape: Not needed: a message says what it is.
        recv_next: Whether to receive.
        next_rank: The global rank; that of the next stage by default.
        dtype: Not needed.
        scatter_gather_tensors: Accepted for programs that pass it.

    Returns:
        What was sent; None on the last stage.

    Communication: broadcast, pp, the bytes of the tensors, each way.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import recv_forward, send_forward_recv_backward
        >>> from colossal.legacy.context import global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.load_config({"parallel": {"pipeline": 2}})
        ...     global_context.init_parallel_groups()
        ...     if global_context.is_pipeline_first_stage():
        ...         return send_forward_recv_backward(torch.ones(1), recv_next=False)
        ...     return recv_forward()
        >>> run_threads(program, 2)
        [None, tensor([1.])]
    """
    del output_grad_shape, dtype, scatter_gather_tensors
    if global_context.is_pipeline_last_stage():
        return None
    if not recv_next:
        return send_forward(output_tensor, next_rank)
    return _link().send_forward_recv_backward(output_tensor, next_rank)[0]


def send_backward_recv_forward(
    input_tensor_grad: Any,
    input_tensor_shape: Any = None,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Send to the stage before, and receive from it.

    Args:
        input_tensor_grad: As of `send_forward`.
        input_tensor_shape: Not needed: a message says what it is.
        recv_prev: Whether to receive.
        prev_rank: The global rank; that of the stage before by default.
        dtype: Not needed.
        scatter_gather_tensors: Accepted for programs that pass it.

    Returns:
        What was sent; None on the first stage.

    Communication: broadcast, pp, the bytes of the tensors, each way.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import recv_backward, send_backward_recv_forward
        >>> from colossal.legacy.context import global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.load_config({"parallel": {"pipeline": 2}})
        ...     global_context.init_parallel_groups()
        ...     if global_context.is_pipeline_last_stage():
        ...         return send_backward_recv_forward(torch.ones(1), recv_prev=False)
        ...     return recv_backward()
        >>> run_threads(program, 2)
        [tensor([1.]), None]
    """
    del input_tensor_shape, dtype, scatter_gather_tensors
    if global_context.is_pipeline_first_stage():
        return None
    if not recv_prev:
        return send_backward(input_tensor_grad, prev_rank)
    return _link().send_backward_recv_forward(input_tensor_grad, prev_rank)[0]


def send_obj_meta(obj: Any, need_meta: bool = True, next_rank: int | None = None) -> bool:
    """Send nothing: every message says what it is.

    Args:
        obj: Not needed.
        need_meta: Not needed.
        next_rank: Not needed.

    Returns:
        False: nothing more is to be sent.

    Example:
        >>> from colossal.legacy.communication import send_obj_meta
        >>> send_obj_meta(None)
        False
    """
    del obj, need_meta, next_rank
    return False


def recv_obj_meta(obj_shape: Any = None, prev_rank: int | None = None) -> Any:
    """Receive nothing: every message says what it is.

    Args:
        obj_shape: What a program knows so far.
        prev_rank: Not needed.

    Returns:
        The same, which `recv_forward` takes.

    Example:
        >>> from colossal.legacy.communication import recv_obj_meta
        >>> recv_obj_meta((2, 3))
        (2, 3)
    """
    del prev_rank
    return obj_shape


def _link() -> PipelineP2PCommunication:
    """What sends and receives on the mesh of the program; all ranks of the pipeline make it at their first message."""
    mesh = current_mesh()
    if mesh not in _LINKS:
        manager: Any = _Neighbors()
        _LINKS[mesh] = PipelineP2PCommunication(manager, overlap_p2p=False)
    return _LINKS[mesh]
