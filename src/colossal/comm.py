"""Collectives along the axes of a mesh, with gradients, and counters of what they send."""

from colossal._src.comm import (
    Channel,
    CommCounter,
    all_reduce_over,
    all_to_all,
    exchange_rows,
    gather,
    matmul_3d,
    reduce,
    reduce_scatter,
    replicate,
    scatter,
    summa_ab,
    summa_abt,
    summa_atb,
)

__all__ = [
    "Channel",
    "CommCounter",
    "all_reduce_over",
    "all_to_all",
    "exchange_rows",
    "gather",
    "matmul_3d",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scatter",
    "summa_ab",
    "summa_abt",
    "summa_atb",
]
