"""Random numbers that are the same on all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from colossal._src.cluster import Axis, ParallelMesh, current_mesh
from colossal._src.comm import Channel
from colossal.accelerator import get_accelerator

# [Note: the random generator of the first rank]
# The initial values of adapters are random. Ranks with different seeds would start from different adapters; shards of
# these form an adapter that no seed gives, without an error. With the random generator of the first rank, any number
# of ranks starts where one process with that seed starts. Afterwards each rank restores its own generator.


@contextmanager
def synced_rng(axes: Sequence[Axis], device: torch.device, mesh: ParallelMesh | None = None) -> Iterator[None]:
    """Give all ranks along some axes the state of the first rank's random generators."""
    if not axes:
        yield
        return
    accelerator = get_accelerator(device.type)
    states = {torch.set_rng_state: torch.get_rng_state(), accelerator.set_rng_state: accelerator.get_rng_state()}
    local_states = {restore: state for restore, state in states.items() if state is not None}
    first = [state.clone() for state in local_states.values()]
    for axis in axes:
        Channel(axis, mesh or current_mesh()).broadcast(first)
    for restore, state in zip(local_states, first, strict=True):
        restore(state)
    try:
        yield
    finally:
        for (restore, mine), theirs in zip(local_states.items(), first, strict=True):
            if not torch.equal(mine, theirs):
                restore(mine)
