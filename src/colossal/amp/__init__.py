"""Numerical precision of a training step: what runs in half precision, and how the loss is scaled."""

from colossal.amp.apex_scaler import ApexScaler
from colossal.amp.autocast import Autocast
from colossal.amp.dynamic_scaler import DynamicScaler, ScalerConfig
from colossal.amp.fp8_linear import FP8Linear
from colossal.amp.loss_scaler import LossScaler, NoScaler
from colossal.amp.master_params import MasterParams
from colossal.amp.master_weights import MasterWeights

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
