"""Parameters in one flat buffer of which each rank keeps a segment, and which is full only while it is used."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import final

import torch
from torch import nn

from colossal._src.comm import Partition, PendingComm
from colossal._src.offload import FileBackedBuffer
from colossal._src.tensor import copy_placement, placement_of, set_backing_shard, set_data, set_values, version_of
from colossal._src.zero.flat_parameters import FlatParameters
from colossal._src.zero.gemini.device_memory import DeviceMemory, GradientBuffers, num_references
from colossal._src.zero.gemini.tensor_state import ChunkPlacement, MemoryTier, TensorState
from colossal._src.zero.gemini.transfer_log import TransferLog
from colossal._src.zero.host_copies import CopyEvent
from colossal._src.zero.zero_config import ZeroConfig


@final
class Chunk(FlatParameters):
    """A buffer of parameters that is sharded over all ranks, and gathered for computation.

    [Note: two forms] Between its uses a chunk is `shard`, this rank's segment, on the tier of its placement. For a use
    it becomes `full`, on the device, and its parameters are views of that. When it is released they become views of one
    NaN, in their own shapes, which makes a read of them visible. If nothing is sharded or moved, `shard` is a view of
    `full`, which stays.

    Source: Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", 2021,
    https://arxiv.org/abs/2108.05818, section 5.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        partition: Partition,
        config: ZeroConfig,
        memory: DeviceMemory,
        traffic: TransferLog,
        placement: ChunkPlacement = ChunkPlacement(),  # noqa: B008 (frozen)
        dtype: torch.dtype | None = None,
        index: int = 0,
    ) -> None:
        pool = GradientBuffers(memory)
        super().__init__(parameters, partition, config, pool, pool, dtype, memory.device)
        self.index, self.placement, self.num_pins = index, placement, 0
        self._memory, self._traffic = memory, traffic
        self.full: torch.Tensor | None = None
        self.states = [TensorState.FREE] * len(self.parameters)
        self._file: FileBackedBuffer | None = None
        self.shard = self._make_shard()
        self.master = self._make_master()
        self.shards = [self._shard_of(index) for index in range(len(self.parameters))]
        self._param_shards = [
            copy_placement(self.shard[begin:end].data, shard)
            for shard, (begin, end) in zip(self.shards, self._local_ranges, strict=True)
        ]
        self._nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.num_updates = 0
        self._spilled: torch.Tensor | None = None
        self._recomputed: set[int] = set()
        self._fetch: PendingComm | None = None
        self._arrival = CopyEvent()
        self._host_grad: torch.Tensor | None = None
        self._note_versions()

    @property
    def is_always_full(self) -> bool:
        """Whether the full parameters are on the device all the time."""
        return self.placement.is_full or (self._partition.size == 1 and self.placement.parameters is MemoryTier.DEVICE)

    @property
    def num_bytes(self) -> int:
        """The bytes of all parameters."""
        return self.numel * self.dtype.itemsize

    @property
    def starts(self) -> list[int]:
        """Where each parameter begins in the full buffer."""
        return self._starts

    @property
    def is_full(self) -> bool:
        """Whether all of the values are on this rank, on the device or spilled to its host."""
        return self.full is not None or self.is_spilled

    @property
    def is_spilled(self) -> bool:
        """Whether the full buffer is on the host for now."""
        return self._spilled is not None

    @property
    def is_prefetching(self) -> bool:
        """Whether it is being gathered ahead of its use."""
        return self._fetch is not None

    @property
    def is_needed_by_backward(self) -> bool:
        """Whether a backward pass is going to read views of the full buffer that were made by recomputation."""
        return bool(self._recomputed)

    @property
    def is_referenced(self) -> bool:
        """Whether other tensors use the memory of the full buffer, such as an activation that is one of its views."""
        # `full` itself, and once it is attached one view for each parameter
        return self.full is not None and num_references(self.full) > 1 + (
            0 if self.is_prefetching else len(self.parameters)
        )

    @torch.no_grad()
    def load_values(self, index: int, values: torch.Tensor) -> None:
        """Take the values of a parameter, whose own memory is given back."""
        if self.is_always_full:
            assert self.full is not None
            self._view_of(self.full, index).copy_(values)
        else:
            for region, view in placement_of(self.shards[index]).local_views(self._param_shards[index]):
                view.copy_(values[region.slices])
        parameter = self.parameters[index]
        set_backing_shard(parameter, self._param_shards[index])
        begin, end = self._local_ranges[index]
        if self.has_copy:
            self.master[begin:end].copy_(self.shard[begin:end])
        # setting `data` would otherwise count as a read, for which the manager gathers this chunk
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (public only as a mode of all threads)
            full = self.full
            set_data(parameter, self._nan.expand(parameter.shape) if full is None else self._view_of(full, index))
        self.states[index] = TensorState.HOLD if self.is_always_full else TensorState.FREE
        self._note_versions()
        self._drop_page_cache()

    @torch.no_grad()
    def start_fetch(self) -> PendingComm:
        """Begin to gather the full buffer on the device; `attach` then makes the parameters views of it.

        Communication: all_gather, dp, the parameters' bytes.
        """
        full = self._memory.take(self.numel, self.dtype, "parameters")
        arrival = self._arrival = self._streams.start(self.shard, self._partition.segment(full))
        if self.placement.parameters is not MemoryTier.DEVICE:
            self._traffic.count("upload", self.shard.nbytes)
        self._drop_page_cache()
        if self._partition.size > 1:
            self._traffic.count("gather", full.nbytes)
        self.full = full
        with self._streams.on_stream(to_host=False):  # after its own segment, while the device computes
            arrival.order()
            gathering = self._partition.start_all_gather(full)
        self._fetch = PendingComm(then=lambda: (arrival.order(), gathering.wait()))
        return self._fetch

    def attach(self) -> None:
        """Wait for the full buffer, and make the parameters views of it."""
        assert self.full is not None
        if self._fetch is not None:
            self._fetch.wait()
            self._fetch = None
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                for index, parameter in enumerate(self.parameters):
                    set_values(parameter, self._view_of(self.full, index))
            self._all_become(TensorState.HOLD)

    def release(self) -> None:
        """Free the full buffer; does nothing if it stays, or is not there."""
        self._spilled = None
        if self.full is None or self.is_always_full:
            return
        if self._fetch is not None:
            self._fetch.wait()
            self._fetch = None
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for parameter, shape in zip(self.parameters, self._shapes, strict=True):
                set_values(parameter, self._nan.expand(shape))
        full, self.full = self.full, None
        self._memory.give_back(full, "parameters")
        self._all_become(TensorState.FREE)

    def copy_grad(self, index: int) -> Iterator[int]:
        """Move a gradient from its parameter into the buffer, ready to be summed up."""
        yield from super().copy_grad(index)
        self._recomputed.discard(index)
        self.states[index] = self.states[index].transition_to(TensorState.READY_FOR_REDUCE)

    def mark_read(self, index: int, is_recomputed: bool = False) -> None:
        """Note that an operation has read a parameter."""
        if is_recomputed and self.parameters[index].requires_grad:
            self._recomputed.add(index)
        calm = TensorState.FREE if self.full is None else TensorState.HOLD
        self.states[index] = TensorState.READY_FOR_REDUCE if index in self._filled else calm

    def mark_backward_read(self, index: int) -> None:
        """Note that a backward pass reads a parameter."""
        if self.states[index] is not TensorState.READY_FOR_REDUCE:
            self.states[index] = (
                self.states[index].transition_to(TensorState.COMPUTE).transition_to(TensorState.HOLD_AFTER_BWD)
            )

    def uses_storage(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is that of the full buffer."""
        return self.full is not None and self.full.untyped_storage()._cdata == storage._cdata  # noqa: SLF001 (the identity of a memory has no public name)

    def spill(self) -> None:
        """Move the full buffer to the host; `start_return` brings it back. Other ranks do not take part."""
        assert self.full is not None
        spilled = self._memory.allocate_host(self.numel, self.dtype).copy_(self.full)
        self._traffic.count("download", spilled.nbytes)
        self.release()
        self._spilled = spilled

    def start_return(self) -> None:
        """Bring the full buffer back from the host; `attach` then makes the parameters views of it."""
        assert self._spilled is not None
        self.full = self._memory.take(self.numel, self.dtype, "parameters").copy_(self._spilled)
        self._traffic.count("upload", self.full.nbytes)
        # nothing is awaited, but `attach` sets parameters only when something is pending
        self._spilled, self._fetch = None, PendingComm()

    def reset(self) -> None:
        """Reset the states after a pass that was interrupted: no operation is under way."""
        self.num_pins = 0
        self._recomputed.clear()
        calm = TensorState.FREE if self.full is None else TensorState.HOLD
        self.states = [calm] * len(self.states)

    @torch.no_grad()
    def start_gather(self, *, is_written: bool = False) -> PendingComm:
        """Copy the new values of the shards to `shard`, and update the full buffer, or free it."""
        self._update_shard(is_written)
        if (
            self.has_copy
            and self.placement.parameters is MemoryTier.DEVICE
            and self.placement.optimizer is not MemoryTier.DEVICE
        ):
            self._traffic.count("upload", self.shard.nbytes)
        self._note_versions()
        self._drop_page_cache()
        return self._renew()

    @torch.no_grad()
    def refresh(
        self,
        only_written: bool = True,
        written: AbstractSet[nn.Parameter] = frozenset(),  # noqa: ARG002 (only operations in a pass have the values)
    ) -> None:
        """Copy values written into `shard`, such as those of a checkpoint, to the master and the full buffer."""
        if self.is_prefetching:
            self._arrival.wait()  # of what was to be used and was not, before an optimizer writes to `shard`
        versions, is_written = self._changes(), only_written and self.is_written
        if only_written and versions == self._versions and not is_written:
            return
        if is_written:
            self.check_written_once()
            self._update_shard(is_written=False)
        else:
            self._update_master(versions if only_written else None)
        self._note_versions()
        self._renew().wait()

    def discard(self) -> None:
        """Discard the gradients."""
        # the buffer on the host is kept, and was not taken from the memory of the device
        if self.grad_shard is not None and self.grad_shard is not self._host_grad:
            self._memory.give_back(self.grad_shard, "gradients")
            self.grad_shard = None
        super().discard()
        self._spare = None
        self.reset()

    def _renew(self) -> PendingComm:
        # views that autograd saved before this are those of other values, see `SavedTensors`
        self.num_updates += 1
        if not self.is_always_full:
            self.release()
            return PendingComm()
        assert self.full is not None
        return self._partition.start_all_gather(self.full)

    def _make_shard(self) -> torch.Tensor:
        if self.is_always_full:
            self.full = self._memory.take(self.numel, self.dtype, "parameters")
            return self._partition.segment(self.full).data  # whose version counts no gathers
        length = self.numel // self._partition.size
        if self.placement.parameters is MemoryTier.DEVICE:
            return self._memory.take(length, self.dtype, "parameters")
        if self.placement.parameters is MemoryTier.DISK:
            self._file = FileBackedBuffer(self._memory.directory, length, self.dtype)
            return self._file.tensor
        return self._memory.allocate_host(length, self.dtype)

    def _make_master(self) -> torch.Tensor:
        wide = self._master_dtype
        is_off_device = MemoryTier.DEVICE not in (self.placement.optimizer, self.placement.parameters)
        if wide == self.dtype and (is_off_device or self.placement.optimizer is self.placement.parameters):
            return self.shard
        if self.placement.optimizer is MemoryTier.DEVICE:
            return self._memory.take(self.shard.numel(), wide, "optimizer")
        return self._memory.allocate_host(self.shard.numel(), wide)

    def _drop_page_cache(self) -> None:
        if self._file is not None:
            self._file.drop_page_cache()

    def _new_segment(self, own: torch.Tensor) -> torch.Tensor:
        return self._memory.take(own.numel(), own.dtype, "gradients")

    def _add(self, summed: torch.Tensor) -> Iterator[int]:
        """Bring a sum to the optimizer's tier and type."""
        self.states = [TensorState.FREE if self.full is None else TensorState.HOLD for _ in self.states]
        self._traffic.count("reduce", self.numel * summed.dtype.itemsize)
        if self.placement.optimizer is not MemoryTier.DEVICE:
            self._traffic.count("download", summed.nbytes)
            if self._host_grad is None:
                self._host_grad = self._memory.allocate_host(summed.numel(), self.master.dtype)
            self._add_on_host(summed, self._host_grad)
            # not to be lent again before the copy out of it is over
            self._memory.give_back(summed, "gradients", self._download.order)
            return
        if self.grad_shard is not None:
            self.grad_shard.add_(summed.to(self.grad_shard))
        elif summed.dtype == self.master.dtype:
            self.grad_shard = summed
            return
        else:
            yield summed.numel() * self.master.itemsize
            self.grad_shard = self._memory.take(summed.numel(), self.master.dtype, "gradients").copy_(summed)
        self._memory.give_back(summed, "gradients")

    def _all_become(self, state: TensorState) -> None:
        self.states = [
            each if each is TensorState.READY_FOR_REDUCE else each.transition_to(state) for each in self.states
        ]

    def _changes(self) -> list[int]:
        return list(map(version_of, self._param_shards))
