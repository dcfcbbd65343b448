"""Numerical precision of a training step: what runs in half precision, and how the loss is scaled."""

from typing import TYPE_CHECKING

from colossal._src.amp.autocast import Autocast
from colossal._src.amp.data_aliases import DataAliases
from colossal._src.amp.dynamic_scaler import DynamicScaler, ScalerConfig
from colossal._src.amp.fp8_linear import SIZE_MULTIPLE, FP8Linear, has_float8, has_fp8_sizes, quantize_fp8
from colossal._src.amp.half_precision import cast_floats, cast_inputs_and_outputs, cast_model, castable_parameters
from colossal._src.amp.loss_scaler import LossScaler, NoScaler
from colossal._src.amp.master_weights import MasterParams, MasterWeights, refuse_two_writes
from colossal._src.amp.naive_amp import ConstantGradScaler, DynamicGradScaler

if TYPE_CHECKING:
    from colossal._src.amp.apex_scaler import ApexScaler

__all__ = [
    "SIZE_MULTIPLE",
    "ApexScaler",
    "Autocast",
    "ConstantGradScaler",
    "DataAliases",
    "DynamicGradScaler",
    "DynamicScaler",
    "FP8Linear",
    "LossScaler",
    "MasterParams",
    "MasterWeights",
    "NoScaler",
    "ScalerConfig",
    "cast_floats",
    "cast_inputs_and_outputs",
    "cast_model",
    "castable_parameters",
    "has_float8",
    "has_fp8_sizes",
    "quantize_fp8",
    "refuse_two_writes",
]


def __getattr__(name: str) -> object:
    if name != "ApexScaler":  # which few programs need
        raise AttributeError(f"module 'colossal._src.amp' has no attribute {name!r}")
    from colossal._src.amp.apex_scaler import ApexScaler

    return ApexScaler
