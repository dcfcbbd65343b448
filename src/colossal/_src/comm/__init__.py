"""Data in motion: collectives along the axes of a mesh, with gradients, and counted."""

import importlib
from typing import TYPE_CHECKING

from colossal._src.comm.channel import Channel, chunk_bounds, group_into_buckets
from colossal._src.comm.counter import CommCounter, active_counters, count_collective, uncounted
from colossal._src.comm.group_reduce import (
    all_reduce_over,
    equal_on_all_ranks,
    equal_text_on_all_ranks,
    gather_objects,
    int64_digest,
)
from colossal._src.comm.ops import (
    all_to_all,
    end_graphs_at_collectives,
    end_graphs_in,
    exchange_rows,
    gather,
    reduce,
    reduce_scatter,
    replicate,
    scatter,
)
from colossal._src.comm.partition import Partition, PendingComm
from colossal._src.comm.random_streams import RandomStreams, TokenStream, draw_number, stream_seed
from colossal._src.comm.ring_exchange import Exchange, ring_all_gather, ring_reduce_scatter

if TYPE_CHECKING:
    from colossal._src.comm.fp8 import all_reduce_fp8, fp8_nbytes, reduce_scatter_fp8
    from colossal._src.comm.lost_peers import CallOfAllRanks, LostPeerGuard
    from colossal._src.comm.matmul3d import gather_packed_rows, matmul_3d
    from colossal._src.comm.row_exchange import RowExchange
    from colossal._src.comm.summa import summa_ab, summa_abt, summa_atb

_MODULE_OF = {
    "CallOfAllRanks": "colossal._src.comm.lost_peers",
    "LostPeerGuard": "colossal._src.comm.lost_peers",
    "RowExchange": "colossal._src.comm.row_exchange",
    "all_reduce_fp8": "colossal._src.comm.fp8",
    "fp8_nbytes": "colossal._src.comm.fp8",
    "gather_packed_rows": "colossal._src.comm.matmul3d",
    "matmul_3d": "colossal._src.comm.matmul3d",
    "reduce_scatter_fp8": "colossal._src.comm.fp8",
    "summa_ab": "colossal._src.comm.summa",
    "summa_abt": "colossal._src.comm.summa",
    "summa_atb": "colossal._src.comm.summa",
}  # which few programs need

__all__ = [
    "CallOfAllRanks",
    "Channel",
    "CommCounter",
    "Exchange",
    "LostPeerGuard",
    "Partition",
    "PendingComm",
    "RandomStreams",
    "RowExchange",
    "TokenStream",
    "active_counters",
    "all_reduce_fp8",
    "all_reduce_over",
    "all_to_all",
    "chunk_bounds",
    "count_collective",
    "draw_number",
    "end_graphs_at_collectives",
    "end_graphs_in",
    "equal_on_all_ranks",
    "equal_text_on_all_ranks",
    "exchange_rows",
    "fp8_nbytes",
    "gather",
    "gather_objects",
    "gather_packed_rows",
    "group_into_buckets",
    "int64_digest",
    "matmul_3d",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fp8",
    "replicate",
    "ring_all_gather",
    "ring_reduce_scatter",
    "scatter",
    "stream_seed",
    "summa_ab",
    "summa_abt",
    "summa_atb",
    "uncounted",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal._src.comm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
