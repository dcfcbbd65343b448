"""Flattened parameters whose gradients are reduced together, each segment to the rank that owns it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from colossal._src._dtypes import HALF_DTYPES
from colossal._src.amp import refuse_two_writes
from colossal._src.comm import Partition, PendingComm
from colossal._src.tensor import FlatLayout, copy_placement, grad_of, placement_of, set_grad, set_placement, version_of
from colossal._src.zero.buffer_pool import Pool
from colossal._src.zero.host_copies import CopyEvent, CopyStreams
from colossal._src.zero.zero_config import ZeroConfig

_ALIGNMENT = 16
_WORTH_ALIGNING = 1 << 12
_requires_grad: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class FlatParameters(ABC):
    """Parameters of one dtype and device, of which each rank updates one segment, whatever parameter that falls into.

    Gradients are copied once, into a buffer with the same layout as that of the parameters. With `keeps_gradients` that
    buffer stays; else it is returned as soon as its sum is known.

    [Note: announced bytes] A method that takes buffers is a generator: it yields how many bytes it is going to take,
    and takes them when it is resumed. So its caller frees memory in between, which neither this nor the pool does.
    """

    shard: torch.Tensor  # this rank's segment of the parameters
    master: torch.Tensor  # what the optimizer updates: this rank's segment, or a float32 copy of it
    _versions: list[int]  # of the parameters, and below of `master`, when both had the same values
    _master_version: int
    shards: list[nn.Parameter]  # what is here of each parameter; a range of `master`, maybe an empty one

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        partition: Partition,
        config: ZeroConfig,
        pool: Pool,
        scratch: Pool,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.dtype, self.device = dtype or parameters[0].dtype, device or parameters[0].device
        self._partition, self._config, self._pool, self._scratch_pool = partition, config, pool, scratch
        self._shapes = [parameter.shape for parameter in self.parameters]
        lengths = [parameter.numel() for parameter in self.parameters]
        self._ends = torch.tensor(lengths).cumsum(0).tolist()
        self._starts = [end - length for end, length in zip(self._ends, lengths, strict=True)]
        self.numel = padded_numel(self._ends[-1], partition.size)
        self._local_ranges = self._find_local_ranges()
        self.grad_shard: torch.Tensor | None = None
        self.used = [False] * len(self.parameters)
        self._buffer: torch.Tensor | None = None
        self._filled: set[int] = set()
        self._num_expected = 0
        self._reduction: tuple[PendingComm, torch.Tensor] | None = None
        self._spare: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None
        self._streams = CopyStreams(self.device)
        self._download = self._upload = CopyEvent()
        self._is_uploaded = False

    @property
    def partition(self) -> Partition:
        """The ranks of which each updates a segment."""
        return self._partition

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients may accumulate here without being reduced."""
        return self._config.keeps_gradients

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer updates a copy of the segment instead of the segment itself."""
        return self.master is not self.shard

    @property
    def targets(self) -> dict[nn.Parameter, torch.Tensor]:
        """Where an optimizer may write the new values of each shard itself; nowhere if that is on another device."""
        if not self.has_copy or self.shard.device != self.master.device:
            return {}
        return {
            shard: self.shard[begin:end] for shard, (begin, end) in zip(self.shards, self._local_ranges, strict=True)
        }

    @property
    def _master_dtype(self) -> torch.dtype:
        """What the optimizer updates."""
        return torch.float32 if self._config.master_weights and self.dtype in HALF_DTYPES else self.dtype

    @abstractmethod
    def start_gather(self, *, is_written: bool = False) -> PendingComm:
        """Bring the new values of the shards to where the model computes."""

    @torch.no_grad()
    def start_upload(self) -> None:
        """Begin to copy the new values of the shards to `shard`, if they are elsewhere; `start_gather` goes on."""
        if self.has_copy:
            self._upload, self._is_uploaded = self._streams.start(self.master, self.shard), True

    @abstractmethod
    def refresh(self, only_written: bool = True, written: AbstractSet[nn.Parameter] = frozenset()) -> None:
        """Take values that somebody wrote into the parameters over into the copy that the optimizer updates.

        `written`: those whose values may have been written without a new version.
        """

    @property
    def is_written(self) -> bool:
        """Whether a program has written what the optimizer holds, since the model got its values."""
        return version_of(self.master) != self._master_version

    def check_written_once(self) -> None:
        """Refuse to copy what a program wrote here over what it wrote into parameters of the model."""
        if self.has_copy and self._changes() != self._versions:
            refuse_two_writes()

    @abstractmethod
    def _changes(self) -> list[int]:
        """Count how often each parameter was written."""

    def _note_versions(self) -> None:
        self._versions, self._master_version = self._changes(), version_of(self.master)

    @property
    def trains(self) -> bool:
        """Whether any of the parameters wants a gradient."""
        return True in map(_requires_grad, self.parameters)

    @property
    def is_ready(self) -> bool:
        """Whether every parameter that wants a gradient has brought it since the last reduction."""
        return bool(self._filled) and len(self._filled) >= self._num_expected

    def holds_grad(self, index: int) -> bool:
        """Whether a gradient of a parameter is here, summed up or not."""
        return index in self._filled or (self.grad_shard is not None and self.used[index])

    @property
    def is_waiting(self) -> bool:
        """Whether gradients are here that have not been reduced."""
        if self._reduction is not None:
            return False
        return bool(self._filled) or any(grad is not None for grad in map(grad_of, self.parameters))

    def take_assigned(self) -> bool:
        """Count gradients as used that no backward pass brought, such as those of `torch.autograd.grad`."""
        assigned = [index for index, grad in enumerate(map(grad_of, self.parameters)) if grad is not None]
        for index in assigned:
            self.used[index] = True
        return bool(assigned) and self.is_waiting

    @torch.no_grad()
    def copy_grad(self, index: int) -> Iterator[int]:
        """Move a gradient from its parameter into the buffer, ready to be summed up."""
        buffer = yield from self._gradients()
        parameter = self.parameters[index]
        grad, place = grad_of(parameter), self._view_of(buffer, index)
        assert grad is not None
        if not self._filled:  # counted once for each pass, as it takes a look at all
            self._num_expected = sum(map(_requires_grad, self.parameters))
        scale = self._partition.gradient_scale
        if index in self._filled:
            place.add_(grad, alpha=scale)
        # after `keep` the gradient is a view of this very place already
        elif grad.data_ptr() != place.data_ptr():
            torch.mul(grad, scale, out=place)
        elif scale != 1.0:
            place.mul_(scale)
        # else the next backward pass would add to a gradient that is in the buffer already, and it would count twice
        set_grad(parameter, None)
        self.used[index] = True
        self._filled.add(index)

    @torch.no_grad()
    def keep(self, index: int) -> Iterator[int]:
        """Let a gradient accumulate in the buffer, not yet to be summed up."""
        parameter = self.parameters[index]
        grad = grad_of(parameter)
        assert grad is not None
        self.used[index] = True
        buffer = yield from self._gradients()
        place = self._view_of(buffer, index)
        if buffer.dtype == parameter.dtype and grad.data_ptr() != place.data_ptr():
            set_grad(parameter, place.copy_(grad))

    @torch.no_grad()
    def start_reduction(self) -> Iterator[int]:
        """Begin to sum up what is here; parameters without a gradient count as zeros."""
        buffer = yield from self._gradients()
        for index, parameter in enumerate(self.parameters):
            if index not in self._filled and grad_of(parameter) is not None:
                yield from self.copy_grad(index)
            elif index not in self._filled:
                # the buffer is reused: gradients of an earlier pass, or of another bucket, would be summed up
                self._view_of(buffer, index).zero_()
        buffer[self._ends[-1] :].zero_()
        self._filled.clear()
        own = buffer if self._partition.size == 1 else self._partition.segment(buffer)
        # the full buffer is given back when the sum is known, so that the sum cannot stay in it
        if not self._config.keeps_gradients and self._partition.size > 1:
            yield own.nbytes
            own = self._new_segment(own)
        if room := self._partition.scratch_numel(buffer):
            yield room * buffer.itemsize
            self._scratch = self._scratch_pool.take(room, buffer.dtype, buffer.device)
        self._reduction = self._partition.start_reduce_scatter(buffer, own, self._scratch), own

    @torch.no_grad()
    def finish_reduction(self) -> Iterator[int]:
        """Wait for the sum, and add it to what was summed up since gradients were last thrown away."""
        if self._reduction is None:
            return
        (pending, summed), self._reduction = self._reduction, None
        pending.wait()
        if self._scratch is not None:
            self._scratch_pool.give_back(self._scratch)
            self._scratch = None
        yield from self._add(summed)
        if not self._config.keeps_gradients and self._buffer is not None:
            # on a single rank the sum is the buffer itself
            if self._partition.size > 1:
                self._pool.give_back(self._buffer)
            self._buffer = None

    def _new_segment(self, own: torch.Tensor) -> torch.Tensor:
        """Return room for the sum of this rank's segment."""
        found, self._spare = torch.empty_like(own) if self._spare is None else self._spare, None
        return found

    def _add(self, summed: torch.Tensor) -> Iterator[int]:
        """Add the sum of one backward pass to those of others."""
        if self.grad_shard is None:
            self.grad_shard = summed
        else:
            # sums of many small gradients would round away in half precision
            wide = self.grad_shard.float() if self.grad_shard.dtype in HALF_DTYPES else self.grad_shard
            self.grad_shard = wide.add_(summed)
        yield from ()

    def grads(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Go through the averaged gradients."""
        assert self.grad_shard is not None
        # the host is about to read what the copy brings
        self._download.wait()
        self.grad_shard = self.grad_shard.to(self.master.device, self.master.dtype)
        for shard, (begin, end) in zip(self.shards, self._local_ranges, strict=True):
            yield shard, copy_placement(self.grad_shard[begin:end], shard)

    def discard(self) -> None:
        """Throw the gradients away."""
        self.discard_new()
        if not self._is_grad_shard_in_buffer and self._partition.size > 1 and self._reduces_in(self.grad_shard):
            # the sum of the next step takes this memory instead of new one
            self._spare = self.grad_shard
        self.grad_shard = None
        self.used = [False] * len(self.parameters)

    @torch.no_grad()
    def fill_with_zeros(self) -> None:
        """Throw the gradients away, and keep zeros: a step still decays weights and moments, as that of one process."""
        self.discard_new()
        if self.grad_shard is not None:
            self._download.wait()
            self.grad_shard.zero_()

    def discard_new(self) -> None:
        """Throw those gradients away that have not been summed up."""
        self._filled.clear()
        for parameter in self.parameters:
            set_grad(parameter, None)
        if not self._config.keeps_gradients and self._buffer is not None:
            self._pool.give_back(self._buffer)
            self._buffer = None

    def _shard_of(self, index: int) -> nn.Parameter:
        begin, end = self._local_ranges[index]
        length, start, shape = self.numel // self._partition.size, self._starts[index], self._shapes[index]
        ranks, ranges = [], []
        for rank, at in self._partition.members:
            # a parameter may begin before this segment, end after it, or have no element in it
            first, last = (min(max(edge * length - start, 0), shape.numel()) for edge in (at, at + 1))
            ranks.append(rank)
            # all empty ranges look the same, so that they compare equal
            ranges.append((first, last) if first < last else (0, 0))
        flat = FlatLayout(tuple(shape), tuple(ranks), tuple(ranges))
        shard = nn.Parameter(self.master[begin:end], requires_grad=self.parameters[index].requires_grad)
        placement = placement_of(self.parameters[index])
        set_placement(shard, placement.flattened(flat, self._partition.group, self.device.type))
        return shard

    def _find_local_ranges(self) -> list[tuple[int, int]]:
        """Where each parameter begins and ends in this rank's segment."""
        length = self.numel // self._partition.size
        first = self._partition.rank * length
        return [
            (min(max(start - first, 0), length), min(max(end - first, 0), length))
            for start, end in zip(self._starts, self._ends, strict=True)
        ]

    def _gradients(self) -> Generator[int, None, torch.Tensor]:
        """Return the buffer of gradients, with room for new ones."""
        if self._buffer is None:
            dtype = self._config.communication_dtype or self.dtype
            yield self.numel * dtype.itemsize
            self._buffer = self._pool.take(self.numel, dtype, self.device)
        elif self.grad_shard is not None and self._is_grad_shard_in_buffer:
            self.grad_shard = self.grad_shard.clone()  # the sum of an earlier backward pass makes room for this one
        # a copy to the host may still be reading the previous sum out of this buffer
        self._download.order()
        return self._buffer

    @property
    def _is_grad_shard_in_buffer(self) -> bool:
        """Whether the summed gradient is a view of the buffer that gradients are copied to."""
        if self.grad_shard is None or self._buffer is None:
            return False
        return self.grad_shard.data_ptr() == self._partition.segment(self._buffer).data_ptr()

    def _add_on_host(self, summed: torch.Tensor, buffer: torch.Tensor) -> None:
        """Bring the sum of one backward pass to the host, while others are summed up."""
        if self.grad_shard is None:
            self._download = self._streams.start(summed, buffer)
            self.grad_shard = buffer
        else:
            # the host adds to what the first copy brings
            self._download.wait()
            self.grad_shard.add_(summed.to(self.grad_shard))

    def _update_shard(self, is_written: bool) -> None:
        """Bring the new values of the shards to `shard`, unless the optimizer has written them there itself."""
        if self.has_copy and not (is_written and self.targets):
            if not self._is_uploaded:
                self.start_upload()
            # for the next step, whose values are not there yet
            self._is_uploaded = False
            self._upload.order()

    def _update_master(self, versions: list[int] | None, written: AbstractSet[nn.Parameter] = frozenset()) -> None:
        """Take over what somebody wrote into `shard`: of all parameters, or of those whose version has changed."""
        if self.has_copy and (written or versions != self._versions):
            if versions is not None and self.is_written:
                refuse_two_writes()
            for index, (begin, end) in enumerate(self._local_ranges):
                is_new = versions is None or versions[index] != self._versions[index]
                if is_new or (written and self.parameters[index] in written):
                    # the copy out of the master weights may be under way
                    self._upload.wait()
                    here, master = self.shard[begin:end], self.master[begin:end]
                    # a master weight that rounds to the parameter is more precise: only changed values are copied
                    kept = master.to(here.dtype) == here.to(master.device)
                    master.copy_(torch.where(kept, master, here.to(master)))
            self._master_version = version_of(self.master)

    def _reduces_in(self, grad: torch.Tensor | None) -> bool:
        dtype = self._config.communication_dtype or self.dtype
        return grad is not None and grad.dtype == dtype and grad.device == self.device

    def _view_of(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        return buffer[self._starts[index] : self._ends[index]].view(self._shapes[index])


def padded_numel(numel: int, parts: int) -> int:
    """Return the length of a buffer that is partitioned over ranks."""
    step = parts * _ALIGNMENT if numel >= parts * _WORTH_ALIGNING else parts
    return -(-max(numel, 1) // step) * step
