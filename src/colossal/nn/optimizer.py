"""Optimizers: Adam in one pass over memory, and those that save state or take large batches.

They compute in float32, or in float64 for float64 parameters, and keep their state in it. Parameters may be full,
DTensors, or the ranges into which ZeRO partitions them: updates are the same.
"""

from colossal._src.nn.optimizer import (
    CAME,
    Adafactor,
    CombinedOptimizer,
    CPUAdam,
    DistGaloreAdamW,
    DistGaloreAwamW,
    DistributedAdaFactor,
    DistributedCAME,
    DistributedLamb,
    FusedAdam,
    FusedLAMB,
    FusedSGD,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    HybridAdam,
    Lamb,
    Lars,
    cast_to_distributed,
    get_galore_param_groups,
)

__all__ = [
    "CAME",
    "Adafactor",
    "CPUAdam",
    "CombinedOptimizer",
    "DistGaloreAdamW",
    "DistGaloreAwamW",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "HybridAdam",
    "Lamb",
    "Lars",
    "cast_to_distributed",
    "get_galore_param_groups",
]
