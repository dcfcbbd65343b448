"""Numerical precision of a training step: what runs in half precision, and how the loss is scaled."""

from colossal.amp.apex_scaler import ApexScaler
from colossal.amp.fp8 import FP8Linear
from colossal.amp.loss_scaler import LossScaler, NoScaler
from colossal.amp.masters import MasterWeights
from colossal.amp.precision import Autocast
from colossal.amp.scaler import DynamicScaler, ScalerConfig
from colossal.amp.stand_in import Masters

__all__ = [
    "ApexScaler",
    "Autocast",
    "DynamicScaler",
    "FP8Linear",
    "LossScaler",
    "MasterWeights",
    "Masters",
    "NoScaler",
    "ScalerConfig",
]
