"""Initializers that know the fans of a layer.

Each function returns an initializer for the layers of `colossal.nn`, which call it with the full tensor and their fans.
The variance for a bias follows from `fan_in` alone.
"""

from colossal._src.legacy.initializers import (
    kaiming_normal_,
    kaiming_uniform_,
    lecun_normal_,
    lecun_uniform_,
    normal_,
    ones_,
    trunc_normal_,
    uniform_,
    xavier_normal_,
    xavier_uniform_,
    zeros_,
)

__all__ = [
    "kaiming_normal_",
    "kaiming_uniform_",
    "lecun_normal_",
    "lecun_uniform_",
    "normal_",
    "ones_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]
