"""Gemini: ZeRO-3 in chunks, which are on the device, on the host, or partly on both."""

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
