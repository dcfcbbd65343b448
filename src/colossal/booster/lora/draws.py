"""Random numbers that are the same on all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from colossal.cluster import Axis, ParallelMesh, current_mesh
from colossal.comm import Channel

# [Note: the draws of the first rank]
# Adapters begin at random. Ranks that draw for themselves begin apart where their seeds differ; shards of different
# adapters then make up one that nobody drew, and no error says so. With the draws of the first rank, any number of
# ranks begins where one process with that seed begins. A rank whose generator stood elsewhere gets it back unused.


@contextmanager
def draws_of_the_first_rank(
    axes: Sequence[Axis], device: torch.device, mesh: ParallelMesh | None = None
) -> Iterator[None]:
    """Let all ranks of some axes draw what the first one draws.

    Args:
        axes: The axes; none changes nothing.
        device: Where the ranks exchange the state of the generator, whose own generator is treated alike.
        mesh: The mesh; the ambient one by default.
    """
    if not axes:
        yield
        return
    generators = [torch.random.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    own = [generator.get_state() for generator in generators]
    shared = [state.to(device, copy=True) for state in own]
    for axis in axes:
        Channel(axis, mesh or current_mesh()).broadcast(shared)
    first = [state.cpu() for state in shared]
    for generator, state in zip(generators, first, strict=True):
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, mine, theirs in zip(generators, own, first, strict=True):
            if not torch.equal(mine, theirs):
                generator.set_state(mine)
