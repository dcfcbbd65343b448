"""The values that the ranks of a replica, and all replicas, start from."""

from collections.abc import Sequence

import xxhash
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel, equal_on_all_ranks
from colossal._src.lazy import LazyTensor, Operation, describe, lazy_tensors, materialize, operations_of, rng_states_of
from colossal._src.tensor import placement_of

_AXES = ("tp", "sp", "dp")


def broadcast_initial_values(module: nn.Module, mesh: ParallelMesh) -> None:
    """Broadcast the values of the first ranks of the tp, sp and dp axes; lazy tensors stay lazy.

    Of a model that is built lazily, ranks only exchange what random numbers are drawn from: each makes, or reads from
    files, what it needs. Where ranks have built in different ways, all values are made, and sent.

    Communication: broadcast, tp, sp and dp, 5 KB for each random operation of lazy tensors, and the bytes of others;
    all_reduce, 16 bytes.
    """
    lazy = list(dict.fromkeys(lazy_tensors(module)))
    operations = operations_of(lazy)
    if not _agree(_describe(module, operations), mesh):
        materialize(module)
        operations = []
    tensors = dict.fromkeys((*module.parameters(), *module.buffers()))
    values = [each for each in tensors if not isinstance(each, LazyTensor)]
    replicated = [each for each in values if not placement_of(each).is_compute_sharded]
    for axis in _AXES:
        Channel(axis, mesh).broadcast([*(replicated if axis == "tp" else values), *rng_states_of(operations)])


def _describe(module: nn.Module, operations: Sequence[Operation]) -> str:
    named = (*module.named_parameters(), *module.named_buffers())
    lines = [f"{name} {placement_of(each).shape} {each.dtype} {type(each).__name__}" for name, each in named]
    return "\n".join([*lines, *map(describe, operations)])


def _agree(text: str, mesh: ParallelMesh) -> bool:
    digest = xxhash.xxh3_64_intdigest(text.encode()) - 2**63
    return all(equal_on_all_ranks([digest], [mesh.group(axis) for axis in _AXES]))
