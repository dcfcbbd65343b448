"""All chunks of a model: which of them are gathered on the device, and when."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import nn

from colossal._src.comm import Partition, end_graphs_in
from colossal._src.interface import digests_of, is_watched, refuse_lost_writes, refuse_tracing
from colossal._src.tensor import values_of
from colossal._src.zero.gemini.access_trace import AccessTrace
from colossal._src.zero.gemini.chunk import Chunk
from colossal._src.zero.gemini.chunk_eviction import ChunkEviction
from colossal._src.zero.gemini.device_memory import DeviceMemory
from colossal._src.zero.gemini.placement_policy import PlacementPolicy
from colossal._src.zero.gemini.saved_tensors import SavedTensors
from colossal._src.zero.gemini.tensor_state import TensorState
from colossal._src.zero.gemini.transfer_log import Event, TransferLog
from colossal.errors import CommunicationError, UnsupportedError

end_graphs_in(__name__)  # chunks come and go between the graphs of a compiled model

# a prime, below which a number and its negative fit into int32, see `agree`
_FINGERPRINT = (1 << 31) - 1
_REMEDY = (
    "Write it before boost, keep it in buffers, or take TorchDDPPlugin or LowLevelZeroPlugin, which keep full "
    "parameters."
)


@final
class ChunkManager:
    """Gathers chunks when their parameters are read, and evicts others.

    [Note: one schedule] All ranks take part in a gather, so all must release the same chunks at the same time. They do,
    because they decide by what is the same on all of them: the order in which chunks are used, the sizes of buffers,
    and the largest of the ranks' measurements of non-model data. Before each step they verify that they have used the
    same chunks in the same order.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        partition: Partition,
        memory: DeviceMemory,
        placement: PlacementPolicy,
        traffic: TransferLog,
        num_ahead: int = 0,
        scatter_after_inference: bool = True,
    ) -> None:
        self.chunks, self.memory, self.traffic, self.trace = list(chunks), memory, traffic, AccessTrace()
        self.partition = partition
        self._placement, self._num_ahead = placement, num_ahead
        self._scatters = scatter_after_inference
        self._places = {
            id(parameter): (chunk, index) for chunk in chunks for index, parameter in enumerate(chunk.parameters)
        }
        self._is_single_rank = partition.world_size == 1
        self._depth = 0
        self._is_training = self._had_backward = False
        self._fingerprint = 0
        self.eviction = ChunkEviction(self.chunks, memory, placement, self.trace, traffic, self._is_single_rank)
        # of the values that were gathered, until a forward pass of training that is watched is over
        self._digests: dict[int, torch.Tensor] | None = None
        self._num_passes = 0
        self._watch()
        self._saved = SavedTensors(self.eviction.count_activations if placement.watches_activations else None)
        for chunk in chunks:
            if chunk.is_always_full:
                self._index_storage(chunk)

    def chunk_of(self, parameter: nn.Parameter) -> tuple[Chunk, int]:
        """Return the chunk of a parameter."""
        return self._places[id(parameter)]

    def has_parameter(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is in one of the chunks."""
        return id(parameter) in self._places

    def chunks_of(self, parameters: Sequence[nn.Parameter]) -> list[Chunk]:
        """Return the chunks of some parameters."""
        found = {self._places[id(parameter)][0].index for parameter in parameters}
        return [self.chunks[index] for index in sorted(found, reverse=True)]

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Run the forward pass of the model inside: only here, and in backward passes, parameters can be read.

        Communication: all_gather, dp, the bytes of the chunks that are read and not gathered.
        """
        refuse_tracing("GeminiPlugin")
        for chunk in self.chunks:
            chunk.refresh()
        training = torch.is_grad_enabled()
        outer, self._is_training = self._is_training, training
        if training and not self._depth:
            self._begin()
            self._num_passes += 1
            if self._digests is None and is_watched(self._num_passes):
                self._watch()
        self._depth += 1
        try:
            with self._saved.hooks(self.fetch) if training else nullcontext():
                yield
            if self._digests is not None and training and self._depth == 1:
                self._end_watch()
        finally:
            self._depth -= 1
            self._is_training = outer
            if not training and self._scatters and not self._depth:
                self.release_all()

    @contextmanager
    def hold_all(self) -> Iterator[None]:
        """Gather all chunks and keep them, so that passes without gradients inside are those of this rank alone.

        Communication: all_gather, dp, the bytes of the chunks that are not gathered.
        """
        with torch.no_grad(), self.forward_pass():
            for chunk in self.chunks:
                chunk.num_pins += 1
            try:
                for chunk in self.chunks:
                    self._use(chunk, is_traced=False)
                yield
            finally:
                for chunk in self.chunks:
                    chunk.num_pins -= 1

    def run_with_full(self, parameters: Sequence[nn.Parameter], call: Callable[[], Any]) -> Any:
        """Make a call that reads parameters, while their chunks are gathered."""
        is_backward = _in_backward()
        if not self._depth and not is_backward:
            raise UnsupportedError(
                "Between passes the values of a parameter are sharded, and only forward and backward passes through "
                "the wrapped model gather them. Found an operation that reads one outside of those. Use the state dict "
                "of the wrapped model, save it by the booster, or read parameters in its forward method; an optimizer "
                "is passed to boost together with the model."
            )
        places, is_traced = [self._places[id(parameter)] for parameter in parameters], self._is_training or is_backward
        for chunk, _ in places:
            # all of them before the first is gathered: a gather must not evict another chunk of the same operation
            chunk.num_pins += 1
        try:
            for chunk, index in places:
                self._use(chunk, is_traced)
                chunk.states[index] = chunk.states[index].transition_to(TensorState.COMPUTE)
            with self._saved.op_hooks(self.fetch) if is_traced else nullcontext():
                return call()
        finally:
            for chunk, index in places:
                chunk.num_pins -= 1
                chunk.mark_read(index, is_recomputed=is_backward)

    def fetch(self, chunk: Chunk, index: int) -> None:
        """Gather a chunk for a backward pass."""
        self._had_backward = True
        chunk.num_pins += 1
        try:
            self._use(chunk, True)
        finally:
            chunk.num_pins -= 1
        chunk.mark_backward_read(index)

    def release_all(self) -> None:
        """Release all chunks that are gathered temporarily."""
        for chunk in self.chunks:
            self.eviction.release(chunk)

    def agree(self, values: list[int]) -> list[int]:
        """Take the largest of all ranks' numbers, and make sure that all have used the same chunks in the same order.

        Communication: all_reduce, dp, 4 bytes for each number, and 8.
        """
        own, self._fingerprint = self._fingerprint, 0
        if self.partition.world_size == 1:
            return values
        # one collective for both: the largest of the negatives is the negative of the smallest
        most, least, *agreed = self._largest_of([own, -own, *values], torch.int32)
        if most != -least:
            raise CommunicationError(
                "All ranks use the same parameters in the same order. Found that they gathered different chunks since "
                "the last step, so their gradients are wrong. Make what the forward pass does independent of the data "
                "of a rank, or train with TorchDDPPlugin or LowLevelZeroPlugin."
            )
        return agreed

    def _begin(self) -> None:
        """Begin a pass, unless the previous one has had no backward pass yet, so that this one belongs to it."""
        if not self._had_backward:
            return
        self._had_backward = False
        self.trace.begin()
        peaks = self.trace.activations
        if self._placement.watches_activations and self.partition.world_size > 1:
            self.trace.activations = self._agree_on_peaks(peaks)

    def _agree_on_peaks(self, peaks: list[int]) -> list[int]:
        """Take the largest of all ranks' measurements, which are of the same periods."""
        most, least = self._largest_of([len(peaks), -len(peaks)])
        if most != -least:
            raise CommunicationError(
                f"All ranks use chunks equally often in a pass. Found {len(peaks)} uses here, and {-least} to {most} on"
                " others. Make what the forward pass does independent of the data of a rank."
            )
        return self._largest_of(peaks) if peaks else peaks

    def _largest_of(self, values: list[int], dtype: torch.dtype = torch.int64) -> list[int]:
        # on the host, where these numbers are: no device has to be waited for (docs/decisions/0010)
        return self.partition.total(torch.tensor(values, dtype=dtype, device="cpu"), "max").tolist()

    def _use(self, chunk: Chunk, is_traced: bool) -> None:
        before = self.trace.period
        if is_traced:
            self.trace.visit(chunk.index)
        if chunk.is_spilled:
            self.eviction.reserve(chunk.num_bytes, "parameters")
            chunk.start_return()
            self.eviction.log_transfer("upload", chunk, chunk.num_bytes)
        if chunk.full is None:
            self._gather(chunk, "gather")
        if chunk.is_prefetching:
            chunk.attach()
            self._index_storage(chunk)
            if self._digests is not None:
                self._digests[chunk.index] = digests_of([values_of(each) for each in chunk.parameters])
        if is_traced and self.trace.period != before:
            self.eviction.evict_until_fits(0)
            self._look_ahead()

    def _watch(self) -> None:
        self._digests = {}
        self.eviction.before_release = partial(_before_release, ref(self))  # the manager holds what holds it

    def _end_watch(self) -> None:
        for chunk in self.chunks:
            self.refuse_writes(chunk)
        self._digests = self.eviction.before_release = None

    def refuse_writes(self, chunk: Chunk) -> None:
        """Refuse what a pass wrote into a gathered chunk, which all ranks have in full."""
        before = None if self._digests is None else self._digests.pop(chunk.index, None)
        if before is None or chunk.full is None:
            return
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (public only as a mode of all threads)
            after = digests_of([values_of(each) for each in chunk.parameters])
        for parameter, is_written in zip(chunk.parameters, (before != after).tolist(), strict=True):
            if is_written:
                refuse_lost_writes(f"a parameter of shape {list(parameter.shape)}", "GeminiPlugin", _REMEDY)

    def _look_ahead(self) -> None:
        """Begin to gather the next chunks, as long as that evicts no others."""
        for number in self.trace.coming(self._num_ahead):
            chunk = self.chunks[number]
            if not chunk.is_full:
                # how much memory this rank has must not decide which chunks all ranks gather
                is_out_of_memory = self._is_single_rank and self.memory.available < chunk.num_bytes
                if is_out_of_memory or not self.eviction.has_room_for(chunk.num_bytes):
                    return
                self._gather(chunk, "prefetch")

    def _gather(self, chunk: Chunk, event: Event) -> None:
        self.eviction.evict_until_fits(chunk.num_bytes)
        self.eviction.reserve(chunk.num_bytes, "parameters")
        chunk.start_fetch()
        # a hash of the order too: ranks that gather the same chunks in another order exchange wrong values
        self._fingerprint = (self._fingerprint * 1_000_003 + chunk.index + 1) % _FINGERPRINT
        self.eviction.log_transfer(event, chunk, chunk.num_bytes)

    def _index_storage(self, chunk: Chunk) -> None:
        assert chunk.full is not None
        self._saved.chunks_by_storage[chunk.full.untyped_storage()._cdata] = chunk  # noqa: SLF001 (the identity of a memory has no public name)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 (no public function returns it)


def _before_release(manager: "ref[ChunkManager]", chunk: Chunk) -> None:
    if (found := manager()) is not None:
        found.refuse_writes(chunk)
