"""Numerical precision of a training step: what runs in half precision, and how the loss is scaled."""

from colossal.amp.loss_scaler import LossScaler, NoScaler
from colossal.amp.precision import Autocast
from colossal.amp.scaler import DynamicScaler, ScalerConfig

__all__ = ["Autocast", "DynamicScaler", "LossScaler", "NoScaler", "ScalerConfig"]
