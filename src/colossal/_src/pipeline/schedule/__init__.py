"""Schedules of a pipeline: what each rank does, in which order."""

from collections.abc import Mapping
from types import MappingProxyType

from colossal._src.pipeline.schedule.action import Action, ActionKind, Costs, PipelineOrder
from colossal._src.pipeline.schedule.given_order import GivenSchedule, Schedule, ScheduleNode
from colossal._src.pipeline.schedule.greedy import forward_only, zero_bubble_v
from colossal._src.pipeline.schedule.one_f_one_b import interleaved, one_forward_one_backward
from colossal._src.pipeline.schedule.p2p_messages import P2PMessage, p2p_messages
from colossal._src.pipeline.schedule.simulate import Pass, bubble_fraction, simulate
from colossal._src.pipeline.schedule.stage_placement import PipelineStyle
from colossal._src.pipeline.schedule.verification import check_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "GivenSchedule",
    "P2PMessage",
    "Pass",
    "PipelineOrder",
    "Schedule",
    "ScheduleNode",
    "bubble_fraction",
    "check_schedule",
    "forward_only",
    "interleaved",
    "one_forward_one_backward",
    "p2p_messages",
    "simulate",
    "zero_bubble_v",
]

SCHEDULES: Mapping[PipelineStyle, Schedule] = MappingProxyType(
    {"1f1b": one_forward_one_backward, "interleaved": interleaved, "zbv": zero_bubble_v}
)
"""The schedule of each ``pp_style``; each takes a `StagePlacement` and the number of micro-batches."""
