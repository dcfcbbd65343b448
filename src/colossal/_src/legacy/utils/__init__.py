"""Helpers of the older API: timers, loaders, one-file checkpoints, memory reports, questions about the mesh."""

from colossal._src.legacy.utils.activation_checkpoint import checkpoint
from colossal._src.legacy.utils.basics import (
    MultiTensorApply,
    conditional_context,
    disposable,
    empty_cache,
    ensure_path_exists,
    free_storage,
    get_non_persistent_buffers_set,
    is_ddp_ignored,
    multi_tensor_applier,
    print_rank_0,
    set_seed,
    set_to_cuda,
    synchronize,
)
from colossal._src.legacy.utils.checkpoint_file import load_checkpoint, save_checkpoint
from colossal._src.legacy.utils.dataloader import DataParallelSampler, get_dataloader
from colossal._src.legacy.utils.device_binding import DeviceBinding
from colossal._src.legacy.utils.memory_fraction import colo_device_memory_capacity, colo_set_process_memory_fraction
from colossal._src.legacy.utils.memory_report import TensorDetector, report_memory_usage
from colossal._src.legacy.utils.parallel_state import (
    clip_grad_norm_fp32,
    count_zeros_fp32,
    is_dp_rank_0,
    is_no_pp_or_last_stage,
    is_tp_rank_0,
    is_using_ddp,
    is_using_pp,
    is_using_sequence,
    switch_virtual_pipeline_parallel_rank,
    sync_model_param,
)
from colossal._src.legacy.utils.timer import MultiTimer, Timer

__all__ = [
    "DataParallelSampler",
    "DeviceBinding",
    "MultiTensorApply",
    "MultiTimer",
    "TensorDetector",
    "Timer",
    "checkpoint",
    "clip_grad_norm_fp32",
    "colo_device_memory_capacity",
    "colo_set_process_memory_fraction",
    "conditional_context",
    "count_zeros_fp32",
    "disposable",
    "empty_cache",
    "ensure_path_exists",
    "free_storage",
    "get_dataloader",
    "get_non_persistent_buffers_set",
    "is_ddp_ignored",
    "is_dp_rank_0",
    "is_no_pp_or_last_stage",
    "is_tp_rank_0",
    "is_using_ddp",
    "is_using_pp",
    "is_using_sequence",
    "load_checkpoint",
    "multi_tensor_applier",
    "print_rank_0",
    "report_memory_usage",
    "save_checkpoint",
    "set_seed",
    "set_to_cuda",
    "switch_virtual_pipeline_parallel_rank",
    "sync_model_param",
    "synchronize",
]
