"""Tables from the names in a config to classes and functions."""

from colossal._src.legacy.registry import (
    DATA_SAMPLERS,
    DATASETS,
    DIST_GROUP_INITIALIZER,
    GRADIENT_HANDLER,
    HOOKS,
    LAYERS,
    LOSSES,
    LR_SCHEDULERS,
    MODELS,
    OPHOOKS,
    OPTIMIZERS,
    SCHEDULE,
    TRANSFORMS,
    Registry,
)

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "DIST_GROUP_INITIALIZER",
    "GRADIENT_HANDLER",
    "HOOKS",
    "LAYERS",
    "LOSSES",
    "LR_SCHEDULERS",
    "MODELS",
    "OPHOOKS",
    "OPTIMIZERS",
    "SCHEDULE",
    "TRANSFORMS",
    "Registry",
]
