"""Collectives in the group of a mode, and messages between the stages of a pipeline, without gradients."""

from colossal._src.legacy.communication import (
    all_gather,
    all_reduce,
    broadcast,
    recv_backward,
    recv_forward,
    recv_obj_meta,
    reduce,
    reduce_scatter,
    send_backward,
    send_backward_recv_forward,
    send_forward,
    send_forward_recv_backward,
    send_obj_meta,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "recv_backward",
    "recv_forward",
    "recv_obj_meta",
    "reduce",
    "reduce_scatter",
    "send_backward",
    "send_backward_recv_forward",
    "send_forward",
    "send_forward_recv_backward",
    "send_obj_meta",
]
