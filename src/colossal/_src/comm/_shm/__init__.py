# pyright: reportPrivateImportUsage=false
"""The backend ``shm`` of torch.distributed: collectives of the ranks of one host, at the speed of its memory.

.. code-block:: text

    segment.py          the memory, and how the ranks find it
    engine.py           the compiled library: csrc/cpu/shm.cpp
    fault.py            error messages for a group that is broken
    work.py             what is under way
    progress_thread.py  moves messages for which no caller waits
    tensors.py          what is required of tensors, and the addresses of their parts
    options.py          what a caller asks for
    group.py            the process group that torch.distributed sees
"""

import os
from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from colossal._src.comm._shm.engine import Kind, SharedMemoryEngine, functions, instruction_set
from colossal._src.comm._shm.group import SharedMemoryGroup
from colossal._src.comm._shm.segment import map_shared_memory
from colossal.errors import UnsupportedError

__all__ = [
    "Kind",
    "create",
    "instruction_set",
    "make_engine",
]


def create(options: Any, _: object = None) -> SharedMemoryGroup:
    """Make a group; torch.distributed calls this for ``backend="shm"``.

    Communication: every rank writes to the store and reads what the others wrote.
    """
    rank, store = options.group_rank, options.store
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return SharedMemoryGroup(store, make_engine(store, rank, ranks), options.timeout, options.group_id)


def make_engine(store: dist.Store, rank: int, global_ranks: Sequence[int]) -> SharedMemoryEngine:
    """Open this rank's end of new shared memory."""
    problem, num_bytes, size = "", 0, len(global_ranks)
    try:
        library = functions()
    except UnsupportedError as error:
        problem = str(error)
    else:
        most = library["max_ranks"]()
        problem = f"there are {size} ranks, and at most {most} can share memory" if size > most else ""
        num_bytes = 0 if problem else library["bytes"](size)
    descriptor, pids = map_shared_memory(dist.PrefixStore("shm/", store), rank, size, num_bytes, problem)
    try:
        return SharedMemoryEngine(descriptor, rank, pids, global_ranks)
    finally:
        # The mapping stays without it, and all ranks have opened theirs when `map_shared_memory` returns.
        os.close(descriptor)
