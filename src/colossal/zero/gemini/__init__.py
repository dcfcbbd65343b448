"""Gemini: ZeRO-3 by chunks, whose parts are on the device, on the host, or on both."""

from colossal.zero.gemini.activations import SavedTensors
from colossal.zero.gemini.chunk import Chunk
from colossal.zero.gemini.chunks import ChunkManager
from colossal.zero.gemini.config import GeminiConfig
from colossal.zero.gemini.memory import DeviceMemory
from colossal.zero.gemini.module import GeminiDDP, get_static_torch_model
from colossal.zero.gemini.optimizer import GeminiAdamOptimizer, GeminiOptimizer
from colossal.zero.gemini.parameter_order import ParameterOrder
from colossal.zero.gemini.placement import AutoPlacement, PlacementPolicy, StaticPlacement
from colossal.zero.gemini.search import search_chunk_configuration
from colossal.zero.gemini.state import TensorState
from colossal.zero.gemini.tiers import Home, Tier
from colossal.zero.gemini.trace import AccessTrace
from colossal.zero.gemini.traffic import Move, Traffic

__all__ = [
    "AccessTrace",
    "AutoPlacement",
    "Chunk",
    "ChunkManager",
    "DeviceMemory",
    "GeminiAdamOptimizer",
    "GeminiConfig",
    "GeminiDDP",
    "GeminiOptimizer",
    "Home",
    "Move",
    "ParameterOrder",
    "PlacementPolicy",
    "SavedTensors",
    "StaticPlacement",
    "TensorState",
    "Tier",
    "Traffic",
    "get_static_torch_model",
    "search_chunk_configuration",
]
