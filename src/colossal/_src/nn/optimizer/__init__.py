"""Optimizers: Adam in one pass over memory, and those that save state or take large batches.

They compute in float32, or in float64 for float64 parameters, and keep their state in it. Parameters may be full,
DTensors, or the ranges into which ZeRO partitions them: updates are the same.
"""

from colossal._src.nn.optimizer.adafactor import Adafactor, DistributedAdaFactor
from colossal._src.nn.optimizer.adam import CPUAdam, FusedAdam, HybridAdam
from colossal._src.nn.optimizer.came import CAME, DistributedCAME
from colossal._src.nn.optimizer.combined import CombinedOptimizer
from colossal._src.nn.optimizer.galore import DistGaloreAwamW, GaLoreAdamW, GaLoreAdamW8bit
from colossal._src.nn.optimizer.galore_adafactor import GaLoreAdafactor
from colossal._src.nn.optimizer.galore_param_groups import get_galore_param_groups
from colossal._src.nn.optimizer.lamb import DistributedLamb, FusedLAMB, Lamb
from colossal._src.nn.optimizer.lars import Lars
from colossal._src.nn.optimizer.sgd import FusedSGD
from colossal._src.nn.optimizer.to_distributed import cast_to_distributed

DistGaloreAdamW = DistGaloreAwamW

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
