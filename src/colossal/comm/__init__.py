"""Data in motion: collectives along the axes of a mesh, with gradients, and counted."""

from colossal.comm.channel import Channel
from colossal.comm.counter import CommCounter, active_counters, count, uncounted
from colossal.comm.cube import gather_packed_rows, matmul_3d
from colossal.comm.ops import all_to_all, gather, reduce, reduce_scatter, replicate, scatter
from colossal.comm.over import all_reduce_over, gather_objects, same_over
from colossal.comm.partition import Partition, Pending
from colossal.comm.ring import Exchange, pass_round, sum_round
from colossal.comm.summa import summa_ab, summa_abt, summa_atb

__all__ = [
    "Channel",
    "CommCounter",
    "Exchange",
    "Partition",
    "Pending",
    "active_counters",
    "all_reduce_over",
    "all_to_all",
    "count",
    "gather",
    "gather_objects",
    "gather_packed_rows",
    "matmul_3d",
    "pass_round",
    "reduce",
    "reduce_scatter",
    "replicate",
    "same_over",
    "scatter",
    "sum_round",
    "summa_ab",
    "summa_abt",
    "summa_atb",
    "uncounted",
]
