"""Schedules of a pipeline: what each rank does, in which order."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from colossal.pipeline.placement import PipelineStyle
from colossal.pipeline.schedule.action import Action, ActionKind, Costs, Orders
from colossal.pipeline.schedule.check import check_schedule
from colossal.pipeline.schedule.greedy import forward_only, zero_bubble_v
from colossal.pipeline.schedule.message import Message, messages_between
from colossal.pipeline.schedule.one_f_one_b import interleaved, one_forward_one_backward
from colossal.pipeline.schedule.simulate import Pass, bubble_of, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "Message",
    "Orders",
    "Pass",
    "bubble_of",
    "check_schedule",
    "forward_only",
    "interleaved",
    "messages_between",
    "one_forward_one_backward",
    "simulate",
    "zero_bubble_v",
]

SCHEDULES: Mapping[PipelineStyle, Callable[..., Orders]] = MappingProxyType(
    {"1f1b": one_forward_one_backward, "interleaved": interleaved, "zbv": zero_bubble_v}
)
"""The schedule of each ``pp_style``; each takes a `StagePlacement` and the number of micro-batches."""
