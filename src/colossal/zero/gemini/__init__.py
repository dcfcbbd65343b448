"""Gemini: ZeRO-3 by chunks, whose parts are on the device, on the host, or on both."""

from colossal.zero.gemini.access_trace import AccessTrace
from colossal.zero.gemini.chunk import Chunk
from colossal.zero.gemini.chunk_manager import ChunkManager
from colossal.zero.gemini.chunk_placement import ChunkPlacement, MemoryTier
from colossal.zero.gemini.chunk_search import search_chunk_configuration
from colossal.zero.gemini.device_memory import DeviceMemory
from colossal.zero.gemini.gemini_config import GeminiConfig
from colossal.zero.gemini.gemini_ddp import GeminiDDP, get_static_torch_model
from colossal.zero.gemini.gemini_optimizer import GeminiAdamOptimizer, GeminiOptimizer
from colossal.zero.gemini.parameter_order import ParameterOrder
from colossal.zero.gemini.placement_policy import AutoPlacement, PlacementPolicy, StaticPlacement
from colossal.zero.gemini.saved_tensors import SavedTensors
from colossal.zero.gemini.tensor_state import TensorState
from colossal.zero.gemini.transfer_log import Transfer, TransferLog

__all__ = [
    "AccessTrace",
    "AutoPlacement",
    "Chunk",
    "ChunkManager",
    "ChunkPlacement",
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
    "search_chunk_configuration",
]
