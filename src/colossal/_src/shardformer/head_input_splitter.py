"""Shards arguments of attention that have values for each head of the full model."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from colossal._src import comm
from colossal._src.cluster import ParallelMesh


@final
class HeadInputSplitter:
    """A hook that keeps of some arguments what this rank's heads need.

    Communication: none forward; backward all_gather, tp, the argument's bytes.
    """

    def __init__(self, arguments: Sequence[str], mesh: ParallelMesh) -> None:
        self._arguments, self._mesh = arguments, mesh

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Shard the arguments of a call."""
        heads = module.num_heads * self._mesh.size("tp")
        given = {name: kwargs[name] for name in self._arguments if kwargs.get(name) is not None}
        return args, {**kwargs, **{name: self._local_heads(full, heads) for name, full in given.items()}}

    def _local_heads(self, full: torch.Tensor, heads: int) -> torch.Tensor:
        if full.dim() > 1 and full.shape[1] == heads:
            return comm.scatter(full, "tp", 1, self._mesh)
        if full.shape[0] % heads:
            return full
        return comm.scatter(full.unflatten(0, (-1, heads)), "tp", 1, self._mesh).flatten(0, 1)
