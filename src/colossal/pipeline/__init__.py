"""Models cut into stages that ranks of the pp axis have, and batches that pass through them in parts."""

from colossal.pipeline.cut import copy_structure, count_layers
from colossal.pipeline.executor import PipelineExecutor
from colossal.pipeline.microbatch import Microbatching, join, map_tensors, split
from colossal.pipeline.partition import partition_balanced, partition_by_counts, partition_uniform, stage_of_layer
from colossal.pipeline.placement import PipelineStyle, StagePlacement
from colossal.pipeline.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Costs,
    Message,
    Orders,
    Pass,
    bubble_of,
    check_schedule,
    forward_only,
    interleaved,
    messages_between,
    one_forward_one_backward,
    simulate,
    zero_bubble_v,
)
from colossal.pipeline.sequence import ExecutionSequence, is_sequence
from colossal.pipeline.shared_grads import share_tied_values
from colossal.pipeline.shared_parameter import SharedParameter
from colossal.pipeline.stage import Carry, Stage, arguments_of
from colossal.pipeline.stage_manager import PipelineStageManager
from colossal.pipeline.stand_in import Passage
from colossal.pipeline.timeline import Timeline
from colossal.pipeline.weight_grads import WeightGrads
from colossal.pipeline.weights import layer_parameters, layer_seconds

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Carry",
    "Costs",
    "ExecutionSequence",
    "Message",
    "Microbatching",
    "Orders",
    "Pass",
    "Passage",
    "PipelineExecutor",
    "PipelineStageManager",
    "PipelineStyle",
    "SharedParameter",
    "Stage",
    "StagePlacement",
    "Timeline",
    "WeightGrads",
    "arguments_of",
    "bubble_of",
    "check_schedule",
    "copy_structure",
    "count_layers",
    "forward_only",
    "interleaved",
    "is_sequence",
    "join",
    "layer_parameters",
    "layer_seconds",
    "map_tensors",
    "messages_between",
    "one_forward_one_backward",
    "partition_balanced",
    "partition_by_counts",
    "partition_uniform",
    "share_tied_values",
    "simulate",
    "split",
    "stage_of_layer",
    "zero_bubble_v",
]
