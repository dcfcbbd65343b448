"""Gemini: ZeRO-3 by chunks, whose parts are on the device, on the host, or on both."""

from colossal._src.zero.gemini.access_trace import AccessTrace
from colossal._src.zero.gemini.chunk import Chunk
from colossal._src.zero.gemini.chunk_manager import ChunkManager
from colossal._src.zero.gemini.chunk_search import (
    ChunkUsage,
    ParameterOrder,
    pack_parameters,
    search_chunk_configuration,
    unshared_parameters,
)
from colossal._src.zero.gemini.device_memory import DeviceMemory
from colossal._src.zero.gemini.gemini_config import GeminiConfig
from colossal._src.zero.gemini.gemini_ddp import GeminiDDP, get_static_torch_model
from colossal._src.zero.gemini.gemini_optimizer import GeminiAdamOptimizer, GeminiOptimizer
from colossal._src.zero.gemini.placement_policy import AutoPlacement, PlacementPolicy, StaticPlacement
from colossal._src.zero.gemini.saved_tensors import SavedTensors
from colossal._src.zero.gemini.tensor_state import ChunkPlacement, MemoryTier, TensorState
from colossal._src.zero.gemini.transfer_log import Transfer, TransferLog

__all__ = [
    "AccessTrace",
    "AutoPlacement",
    "Chunk",
    "ChunkManager",
    "ChunkPlacement",
    "ChunkUsage",
    "DeviceMemory",
    "GeminiAdamOptimizer",
    "GeminiConfig",
    "GeminiDDP",
    "GeminiOptimizer",
    "MemoryTier",
    "ParameterOrder",
    "PlacementPolicy",
    "SavedTensors",
    "StaticPlacement",
    "TensorState",
    "Transfer",
    "TransferLog",
    "get_static_torch_model",
    "pack_parameters",
    "search_chunk_configuration",
    "unshared_parameters",
]
