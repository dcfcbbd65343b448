"""The memory of one device, of which every byte that a chunk takes is accounted for."""

import tempfile
from collections.abc import Callable
from typing import Any, Literal, final
from weakref import WeakMethod

import torch

from colossal._src.zero.buffer_pool import zeros
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError

Kind = Literal["parameters", "gradients", "optimizer", "activations"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations")
MODEL_DATA: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
_SLACK = 20


@final
class DeviceMemory:
    """Allocates buffers on the device, and never more bytes than its budget.

    A returned buffer is cached for the next request of its size, and freed when the cache has no room: without a
    budget, when that would take a twentieth more than was ever in use. Buffers are not all of one size, and with no
    more than the most that was in use, each step would free some and allocate new ones, which the system fills with
    zeros page by page. A returned buffer that is still referenced, such as by an activation that is a view of it, is
    not reused until that reference is gone.

    [Note: lingering] A backend may reference a buffer for a moment longer than its work takes, on each rank for a
    different time. Ranks that must decide consistently therefore do not count such buffers; a single rank counts them.

    Args:
        device: The device; with a budget also the CPU, in which case host memory counts as another tier.
        budget: The most bytes; as many as there are by default.
        pin_memory: Page-lock offloaded buffers in host memory.
        counts_lingering: Count buffers that were returned and are still referenced.
        directory: The folder, on a fast disk, of offloaded files; that of temporary files by default.

    Attributes:
        used: Bytes in use, by what they hold.
        peak: The most bytes that were ever in use or kept.

    Example:
        >>> import torch
        >>> from colossal.zero.gemini import DeviceMemory
        >>> memory = DeviceMemory(torch.device("cpu"), budget=1000)
        >>> weights = memory.take(100, torch.float32, "parameters")
        >>> memory.available, memory.used["parameters"]
        (600, 400)
        >>> memory.give_back(weights, "parameters")
        >>> memory.available
        1000
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None = None,
        pin_memory: bool = False,
        counts_lingering: bool = True,
        directory: str | None = None,
    ) -> None:
        self.device, self.budget = device, budget
        self._pins, self._counts_lingering = pin_memory, counts_lingering
        self.directory = directory or tempfile.gettempdir()
        self.used: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.peak = 0
        self._usual = self._most_used = 0
        # instead of torch's caching allocator, whose free blocks are in no account (docs/decisions/0007)
        self._free: list[torch.UntypedStorage] = []
        self._lingering: list[torch.Tensor] = []
        self._before_reuse: dict[int, Callable[[], None]] = {}
        self._oom_handler: WeakMethod[Callable[[], bool]] | None = None

    @property
    def total(self) -> int:
        """Bytes in use."""
        return sum(self.used.values())

    @property
    def model_data(self) -> int:
        """Bytes in use by parameters, gradients and optimizer states."""
        return sum(self.used[kind] for kind in MODEL_DATA)

    @property
    def available(self) -> int:
        """Bytes that are left of the budget; cached buffers are freed when these are needed."""
        if self.budget is None:
            return 1 << 62
        self._sweep()
        lingering = sum(buffer.untyped_storage().nbytes() for buffer in self._lingering)
        return self.budget - self.total - (lingering if self._counts_lingering else 0)

    def fits(self, num_bytes: int) -> bool:
        """Return whether `take` gets a buffer, or `add` accounts for bytes, without an eviction.

        Args:
            num_bytes: The bytes.

        Returns:
            Whether there is room, or a cached buffer that is long enough.
        """
        return self.available >= num_bytes or self._find(num_bytes) is not None

    def _find(self, num_bytes: int) -> torch.UntypedStorage | None:
        """Return the shortest cached buffer that is long enough, and not much longer."""
        most = 2 * num_bytes if self.budget is None else num_bytes + 1  # a budget counts what was asked for
        fitting = (free for free in self._free if num_bytes <= free.nbytes() < most)
        return min(fitting, key=torch.UntypedStorage.nbytes, default=None)

    def take(self, numel: int, dtype: torch.dtype, kind: Kind) -> torch.Tensor:
        """Lend a buffer.

        Args:
            numel: How many elements.
            dtype: Of which type.
            kind: What it is going to hold.

        Returns:
            A tensor of one dimension with any content.

        Raises:
            ConfigError: There is no room in the budget.
        """
        num_bytes = numel * dtype.itemsize
        self._sweep()
        found = self._find(num_bytes)
        if found is None:
            if self.available < num_bytes:
                raise self.refuse(num_bytes, kind)
            self._drop(num_bytes)
            found = self._allocate(num_bytes)
        else:
            self._free = [free for free in self._free if free is not found]
        self.add(kind, found.nbytes())
        if (wait := self._before_reuse.pop(found.data_ptr(), None)) is not None:
            wait()
        buffer: Any = torch.empty(0, dtype=dtype, device=self.device)
        return buffer.set_(found, 0, (numel,))

    def allocate_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a buffer in the memory of the host.

        Args:
            numel: How many elements.
            dtype: Of which type.

        Returns:
            A tensor of one dimension, of zeros.
        """
        if self._pins:
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        return zeros(numel, dtype, torch.device("cpu"))

    def expect(self, num_bytes: int) -> None:
        """Without a budget, round slightly smaller buffers up to a size, so that they can be reused for it.

        Args:
            num_bytes: The size that is going to be requested most often.
        """
        self._usual = num_bytes

    def register_oom_handler(self, handler: Callable[[], bool]) -> None:
        """Set a method that evicts when the device has less memory than expected, such as because of other processes.

        Args:
            handler: A method, which is not kept alive; returns whether it has evicted anything.
        """
        # its object refers to this memory: a cycle would keep all chunks until the garbage collector runs
        self._oom_handler = WeakMethod(handler)

    def _allocate(self, num_bytes: int) -> torch.UntypedStorage:
        if self.budget is None and num_bytes <= self._usual < 2 * num_bytes:
            num_bytes = self._usual
        while True:
            try:
                return zeros(num_bytes, torch.uint8, self.device).untyped_storage()
            except torch.OutOfMemoryError:
                if not self._make_room():
                    raise

    def _make_room(self) -> bool:
        """Free cached buffers, or else call the OOM handler; return whether that freed any memory."""
        handler = None if self._oom_handler is None else self._oom_handler()
        if not self._free and not (handler is not None and handler()):
            return False
        self._sweep()
        self._free.clear()
        self._before_reuse.clear()
        get_accelerator(self.device.type).empty_cache()
        return True

    def give_back(self, buffer: torch.Tensor, kind: Kind, before_reuse: Callable[[], None] | None = None) -> None:
        """Return a buffer.

        Args:
            buffer: A result of `take`.
            kind: What it held.
            before_reuse: Called before it is reused; waits for a copy out of it that is under way.
        """
        if before_reuse is not None:
            self._before_reuse[buffer.untyped_storage().data_ptr()] = before_reuse
        # what was lent may be longer than what was asked for
        self.used[kind] -= buffer.untyped_storage().nbytes()
        self._lingering.append(buffer)
        self._sweep()

    def add(self, kind: Kind, num_bytes: int) -> None:
        """Account for bytes that were not allocated here.

        Args:
            kind: What they hold.
            num_bytes: How many; negative when they are gone.

        Raises:
            ConfigError: There is no room in the budget.
        """
        if num_bytes > 0 and self.available < num_bytes:
            raise self.refuse(num_bytes, kind)
        self.used[kind] += num_bytes
        if num_bytes > 0:
            self._most_used = max(self._most_used, self.total)
            self._drop(0)
            self.peak = max(self.peak, self.total + sum(free.nbytes() for free in self._free))

    def refuse(self, num_bytes: int, purpose: str) -> ConfigError:
        """Make the error of a budget that is too small.

        Args:
            num_bytes: What is needed.
            purpose: For what.

        Returns:
            The error to raise.
        """
        taken = ", ".join(f"{number} for {kind}" for kind, number in self.used.items() if number) or "nothing"
        return ConfigError(
            f"The budget of a device holds what cannot be anywhere else. Found {num_bytes} bytes needed on "
            f"{self.device} for {purpose}, where of device_budget={self.budget} these are taken: {taken}. Pass a "
            f"device_budget of at least {self.total + num_bytes}, smaller chunks (chunk_config_dict), or smaller "
            "batches."
        )

    def _keep(self, buffer: torch.UntypedStorage) -> None:
        """Cache a buffer, as long as all cached ones fit into what is not used."""
        self._free.append(buffer)
        self._drop(0)

    def _drop(self, num_bytes: int) -> None:
        """Free cached buffers until there is room for some more bytes, see the class."""
        usual = self._most_used + self._most_used // _SLACK
        most = max(usual, self.total + num_bytes) if self.budget is None else self.budget
        while self._free and self.total + num_bytes + sum(free.nbytes() for free in self._free) > most:
            self._before_reuse.pop(self._free.pop(0).data_ptr(), None)

    def _sweep(self) -> None:
        """Cache the returned buffers that are not referenced any more."""
        if self._lingering:
            lingering, self._lingering = self._lingering, []
            for buffer in lingering:
                if num_references(buffer) > 1:
                    self._lingering.append(buffer)
                else:
                    self._keep(buffer.untyped_storage())


@final
class GradientBuffers:
    """Allocates buffers of gradients from the memory of a device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # noqa: ARG002 (there is one)
        """Lend a buffer."""
        return self._memory.take(numel, dtype, "gradients")

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._memory.give_back(buffer, "gradients")


def num_references(buffer: torch.Tensor) -> int:
    """Count the tensors that use the memory of one, and itself."""
    storage = buffer.untyped_storage()
    # less the storage object that was just made
    return torch._C._storage_Use_Count(storage._cdata) - 1  # noqa: SLF001 (no public function returns it)
