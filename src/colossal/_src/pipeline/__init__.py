"""Models partitioned into stages over the pp axis, and batches that pass through them in micro-batches."""

from colossal._src.pipeline.execution_sequence import ExecutionSequence, extract_sequence_stage, is_layer_sequence
from colossal._src.pipeline.executor import PipelineExecutor
from colossal._src.pipeline.layer_costs import count_layer_parameters, measure_layer_times
from colossal._src.pipeline.microbatch import (
    Microbatching,
    lacks_labels,
    map_tensors,
    merge_outputs,
    refuse_loss_without_labels,
    split_batch,
    tensors_in,
)
from colossal._src.pipeline.partition import (
    PipelineStageManager,
    partition_balanced,
    partition_by_counts,
    partition_uniform,
    stage_of_layer,
)
from colossal._src.pipeline.placeholders import StageBoundary
from colossal._src.pipeline.row_executor import RowExecutor
from colossal._src.pipeline.row_link import RowLink
from colossal._src.pipeline.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Costs,
    GivenSchedule,
    P2PMessage,
    Pass,
    PipelineOrder,
    Schedule,
    ScheduleNode,
    bubble_fraction,
    check_schedule,
    forward_only,
    interleaved,
    one_forward_one_backward,
    p2p_messages,
    simulate,
    zero_bubble_v,
)
from colossal._src.pipeline.schedule.stage_placement import PipelineStyle, SharedParameter, StagePlacement
from colossal._src.pipeline.stage import Stage, StageOutput, model_arguments
from colossal._src.pipeline.stage_extraction import copy_structure, count_layers
from colossal._src.pipeline.stage_modules import FullOutline, StageArguments, StageModules
from colossal._src.pipeline.tied_gradients import broadcast_tied_parameters
from colossal._src.pipeline.timeline import Timeline
from colossal._src.pipeline.weight_grads import WeightGrads

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "ExecutionSequence",
    "FullOutline",
    "GivenSchedule",
    "Microbatching",
    "P2PMessage",
    "Pass",
    "PipelineExecutor",
    "PipelineOrder",
    "PipelineStageManager",
    "PipelineStyle",
    "RowExecutor",
    "RowLink",
    "Schedule",
    "ScheduleNode",
    "SharedParameter",
    "Stage",
    "StageArguments",
    "StageBoundary",
    "StageModules",
    "StageOutput",
    "StagePlacement",
    "Timeline",
    "WeightGrads",
    "broadcast_tied_parameters",
    "bubble_fraction",
    "check_schedule",
    "copy_structure",
    "count_layer_parameters",
    "count_layers",
    "extract_sequence_stage",
    "forward_only",
    "interleaved",
    "is_layer_sequence",
    "lacks_labels",
    "map_tensors",
    "measure_layer_times",
    "merge_outputs",
    "model_arguments",
    "one_forward_one_backward",
    "p2p_messages",
    "partition_balanced",
    "partition_by_counts",
    "partition_uniform",
    "refuse_loss_without_labels",
    "simulate",
    "split_batch",
    "stage_of_layer",
    "tensors_in",
    "zero_bubble_v",
]
