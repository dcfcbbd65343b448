"""Which chunks leave the device, and when: for other chunks, for gradients, or for memory that somebody else uses."""

from collections.abc import Callable, Sequence
from typing import final

from colossal._src.zero.gemini.access_trace import AccessTrace
from colossal._src.zero.gemini.chunk import Chunk
from colossal._src.zero.gemini.device_memory import DeviceMemory, Kind
from colossal._src.zero.gemini.placement_policy import PlacementPolicy
from colossal._src.zero.gemini.transfer_log import Event, Transfer, TransferLog


@final
class ChunkEviction:
    """Evicts or spills the chunks that are needed farthest in the future."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        memory: DeviceMemory,
        placement: PlacementPolicy,
        trace: AccessTrace,
        traffic: TransferLog,
        is_single_rank: bool,
    ) -> None:
        self._chunks, self._memory, self._placement = chunks, memory, placement
        self._trace, self._traffic, self._is_single_rank = trace, traffic, is_single_rank
        self.before_release: Callable[[Chunk], None] | None = None
        self._largest = max((chunk.num_bytes for chunk in chunks), default=0)
        memory.register_oom_handler(self._evict_or_spill)

    def _room(self) -> int:
        return self._placement.full_chunk_budget(self._largest, self._memory, self._trace)

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether so many bytes more of gathered chunks fit into their budget."""
        return self._temporary() + num_bytes <= self._room()

    def _temporary(self) -> int:
        return sum(chunk.num_bytes for chunk in self._chunks if chunk.is_full and not chunk.is_always_full)

    def evict_until_fits(self, num_bytes: int) -> None:
        """Evict chunks until those that are gathered temporarily, and some bytes more, fit into their budget."""
        while not self.has_room_for(num_bytes) and self._evict():
            pass

    def reserve(self, num_bytes: int, kind: Kind) -> None:
        """Evict or spill chunks until so many bytes are free on the device.

        For a gradient all ranks first evict the same chunks, whether or not this one has room.

        [Note: spilling] One rank may need memory while others do not, such as for a longer batch. It then moves a full
        chunk to its host, and back when it is used. This needs no communication, so that the others are not affected.
        """
        if self._memory.budget is None:
            return
        if kind == "gradients":
            self.evict_until_fits(num_bytes)
        while not self._memory.fits(num_bytes):
            self._free_memory_or_raise(num_bytes, kind)

    def account(self, kind: Kind, num_bytes: int) -> None:
        """Account for bytes on the device that are in no buffer of its memory, and free memory for them."""
        while num_bytes > self._memory.available:
            self._free_memory_or_raise(num_bytes, kind)
        self._memory.add(kind, num_bytes)

    def count_activations(self, num_bytes: int) -> None:
        """Account for what is saved for a backward pass."""
        self.account("activations", num_bytes)
        self._trace.note_activations(self._memory.used["activations"])

    def _free_memory_or_raise(self, num_bytes: int, kind: Kind) -> None:
        """Evict or spill a chunk; raise an error if there is none."""
        if not self._evict_or_spill():
            raise self._memory.refuse(num_bytes, kind)

    def _evict_or_spill(self) -> bool:
        # an evicted chunk is gathered again by all ranks at the same time; a spilled one concerns this rank alone
        return self._evict() if self._is_single_rank else self._spill()

    def _evict(self) -> bool:
        """Evict the chunk that is needed farthest in the future; return whether there was one."""
        found = [chunk for chunk in self._chunks if chunk.is_full and self._can_evict(chunk)]
        if found:
            self.release(max(found, key=self._eviction_key))
        return bool(found)

    def _spill(self) -> bool:
        """Move the chunk that is needed farthest in the future to the host; return whether there was one."""
        found = [chunk for chunk in self._chunks if chunk.full is not None and self._can_evict(chunk)]
        if found:
            chunk = max(found, key=self._eviction_key)
            chunk.spill()
            self.log_transfer("download", chunk, chunk.num_bytes)
        return bool(found)

    def _eviction_key(self, chunk: Chunk) -> tuple[bool, int, int]:
        # the number breaks ties, so that all ranks choose the same chunk
        return not chunk.is_needed_by_backward, self._trace.next_use(chunk.index), chunk.index

    def _can_evict(self, chunk: Chunk) -> bool:
        if chunk.is_always_full or chunk.num_pins or chunk.is_prefetching:
            return False
        return not self._is_single_rank or not chunk.is_referenced  # see [Note: lingering]

    def release(self, chunk: Chunk) -> None:
        """Release a chunk that is gathered temporarily."""
        if chunk.is_full and not chunk.is_always_full:
            if self.before_release is not None:
                self.before_release(chunk)
            chunk.release()
            self.log_transfer("evict", chunk, chunk.num_bytes)

    def log_transfer(self, event: Event, chunk: Chunk, num_bytes: int) -> None:
        """Add a transfer to the log, if it is recording."""
        if self._traffic.is_recording:
            now = self._trace.period
            self._traffic.moves.append(
                Transfer(now, event, chunk.index, num_bytes, self._memory.model_data, self._memory.used["activations"])
            )
