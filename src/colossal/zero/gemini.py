"""Gemini: ZeRO-3 by chunks, whose parts are on the device, on the host, or on both."""

from colossal._src.zero.gemini import (
    AccessTrace,
    AutoPlacement,
    ChunkUsage,
    DeviceMemory,
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiOptimizer,
    MemoryTier,
    StaticPlacement,
    TensorState,
    Transfer,
    TransferLog,
    get_static_torch_model,
    pack_parameters,
    search_chunk_configuration,
    unshared_parameters,
)

__all__ = [
    "AccessTrace",
    "AutoPlacement",
    "ChunkUsage",
    "DeviceMemory",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiOptimizer",
    "MemoryTier",
    "StaticPlacement",
    "TensorState",
    "Transfer",
    "TransferLog",
    "get_static_torch_model",
    "pack_parameters",
    "search_chunk_configuration",
    "unshared_parameters",
]
