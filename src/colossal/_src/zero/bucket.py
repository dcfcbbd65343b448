"""Parameters that are flattened into one buffer on every rank, and are communicated together."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import final

import torch
from torch import nn

from colossal._src.comm import Partition, PendingComm
from colossal._src.tensor import local_of, set_values, version_of
from colossal._src.zero.buffer_pool import BufferPool, zeros
from colossal._src.zero.flat_parameters import FlatParameters
from colossal._src.zero.host_copies import host_buffer
from colossal._src.zero.zero_config import ZeroConfig


@final
class Bucket(FlatParameters):
    """A buffer of parameters, of which each rank updates one segment.

    [Note: one buffer] The parameters of the model are views of `working`, and this rank's shards are views of its
    segment, or of a float32 copy of that. An update of the shards thus is an update of the model, and what remains to
    be done is one all-gather in place: nothing is packed or unpacked.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        partition: Partition,
        config: ZeroConfig,
        pool: BufferPool,
        scratch: BufferPool,
    ) -> None:
        super().__init__(parameters, partition, config, pool, scratch)
        self.working = zeros(self.numel, self.dtype, self.device)
        if not config.keeps_gradients:
            pool.expect(self.numel)
        scratch.expect(partition.scratch_numel(self.working))
        self.shard = partition.segment(self.working).data  # whose version counts no gathers
        self._copy_params_into_buffer()
        self._host_grad: torch.Tensor | None = None
        self.master = self._make_master()
        self.shards = [self._shard_of(index) for index in range(len(self.parameters))]
        self._note_versions()

    def start_gather(self, *, is_written: bool = False) -> PendingComm:
        """Bring the new values of all segments to this rank."""
        self._update_shard(is_written)
        self._note_versions()
        return self._partition.start_all_gather(self.working)

    @torch.no_grad()
    def refresh(self, only_written: bool = True, written: AbstractSet[nn.Parameter] = frozenset()) -> None:
        """Take values that somebody wrote into the parameters over into the copy that the optimizer updates."""
        versions = self._changes()
        self._update_master(versions if only_written else None, written)
        self._versions = versions

    def _copy_params_into_buffer(self) -> None:
        for index, parameter in enumerate(self.parameters):
            place = self._view_of(self.working, index)
            place.copy_(local_of(parameter).detach())
            # assigning `data` keeps the parameter itself, which hooks, tied layers and the user's optimizer refer to
            set_values(parameter, place)

    def _make_master(self) -> torch.Tensor:
        own, wide = self.shard, self._master_dtype
        if self._config.cpu_offload and not own.is_cpu:
            self._host_grad = host_buffer(own.numel(), wide, own.device)
            # page-locked, or the copies of each step would block the host
            return host_buffer(own.numel(), wide, own.device).copy_(own)
        return own if wide == own.dtype else zeros(own.numel(), wide, own.device).copy_(own)

    def _add(self, summed: torch.Tensor) -> Iterator[int]:
        """Add the sum of one backward pass to those of others, where the optimizer is."""
        if self._host_grad is None:
            yield from super()._add(summed)
        else:
            self._add_on_host(summed, self._host_grad)

    def _changes(self) -> list[int]:
        # a parameter keeps its own counter when `data` is assigned: gathers into `working` do not count as writes
        return list(map(version_of, self.parameters))
