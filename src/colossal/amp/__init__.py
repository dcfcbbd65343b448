"""Numerical precision of a training step: what runs in half precision, and how the loss is scaled."""

from colossal.amp.precision import Autocast
from colossal.amp.scaler import DynamicScaler, LossScaler, NoScaler, ScalerConfig

__all__ = ["Autocast", "DynamicScaler", "LossScaler", "NoScaler", "ScalerConfig"]
