"""Numerical precision of a training step: what runs in half precision, and how the loss is scaled."""

from colossal._src.amp.apex_scaler import ApexScaler
from colossal._src.amp.autocast import Autocast
from colossal._src.amp.dynamic_scaler import DynamicScaler, ScalerConfig
from colossal._src.amp.fp8_linear import FP8Linear
from colossal._src.amp.loss_scaler import LossScaler, NoScaler
from colossal._src.amp.master_params import MasterParams
from colossal._src.amp.master_weights import MasterWeights

__all__ = [
    "ApexScaler",
    "Autocast",
    "DynamicScaler",
    "FP8Linear",
    "LossScaler",
    "MasterParams",
    "MasterWeights",
    "NoScaler",
    "ScalerConfig",
]
