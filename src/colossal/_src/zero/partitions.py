"""Which ranks partition the states of which parameter."""

from dataclasses import dataclass, field
from typing import final

import torch

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Partition
from colossal._src.tensor import Replicas, replicas_of
from colossal.errors import MeshError


@final
@dataclass(frozen=True)
class Partitions:
    """One partition for each set of ranks over which parameters are data-parallel; called with a parameter."""

    mesh: ParallelMesh  # on whose dp axis are all ranks that see different samples or tokens
    compress_fp8: bool = False  # let the terms of sums travel in 8 bits
    extra_dp_size: int = 1  # number of blocks of ranks that hold the same shards
    _known: dict[Replicas, Partition] = field(default_factory=dict[Replicas, Partition])

    def __call__(self, parameter: torch.Tensor) -> Partition:
        """Find the ranks over which the states of a parameter are partitioned, and those that hold the same shard."""
        return self.over(replicas_of(parameter, self.mesh))

    def over(self, replicas: Replicas | None = None) -> Partition:
        """Partition over some ranks, by default those of the dp axis.

        Communication: the first time, groups of processes are formed where there are several blocks.
        """
        replicas = replicas or Replicas(self.mesh)
        if replicas not in self._known:
            self._known[replicas] = self._make(replicas)
        return self._known[replicas]

    def _make(self, replicas: Replicas) -> Partition:
        if replicas.size % self.extra_dp_size:
            raise MeshError(
                f"extra_dp_size divides the ranks of the {replicas.axis} axis. Found {self.extra_dp_size} for "
                f"{replicas.size} ranks. Pass a divisor of their number, or leave it out."
            )
        groups = (replicas.group,)
        if self.extra_dp_size > 1:
            groups = self.mesh.blocks(replicas.axis, replicas.size // self.extra_dp_size)
        return Partition(*groups, axis=replicas.axis, num_means=replicas.num_means, compress_fp8=self.compress_fp8)
