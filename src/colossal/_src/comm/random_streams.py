"""The random numbers of a model: equal on ranks that hold the same activations, else different.

Which ones a rank draws follows from its place in the mesh, not from its number or the seed that it happens to have.
"""

import ctypes
import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.cluster import AXES, Axis, ParallelMesh
from colossal._src.comm.counter import uncounted
from colossal._src.comm.group_reduce import all_reduce_over
from colossal.accelerator import Accelerator

_NUMBERS = 2**63 - 1
_MOST_KNOWN = 4096
_REPLICATED: tuple[Axis, ...] = ("sp", "tp")  # whose ranks hold the same activations, but for shards of them
_SHARED_GENERATORS = ("threaded", "fake")  # backends whose ranks are in one process, as are its generators

_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def stream_seed(*numbers: int) -> int:
    """Make the seed of a stream from all that tells it from others."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) % _NUMBERS


def draw_number(buffer: torch.Tensor | None = None) -> int:
    """Draw from torch's own generator what a stream begins with; a buffer of the caller saves most of the time."""
    drawn = torch.empty((), dtype=torch.int64, device="cpu") if buffer is None else buffer
    # a number on the CPU never waits for a device, but what counts such waits cannot tell it from others by `item`
    inside: Any = torch
    # under torch.func it would be an operation of the function that is transformed
    with inside._C._DisableFuncTorch():  # noqa: SLF001 (it has no public name)
        return int(drawn.random_(_NUMBERS).numpy())


@final
class RandomStreams:
    """Gives each forward pass of a model a stream of its own, and the program its generators back after it.

    The program may seed ranks alike, apart, or some of them, and draw between passes. The stream of a pass follows from
    the place on pp and dp, and from a number. Without pp, sp and tp the program's generator draws that number, so that
    what seeds the program seeds the model. Ranks that share activations would have to draw equal ones: they
    agree once, in the first pass, and count passes from then on. A pass that activation checkpointing repeats, with the
    state of the program's generator, finds its number again.

    Communication: in the first pass, all_reduce, sp and tp, 8 bytes; not counted.
    """

    def __init__(self, mesh: ParallelMesh, axes: Sequence[Axis] = AXES) -> None:
        self._device = None if mesh.accelerator.is_cpu else mesh.accelerator  # that has a generator of its own
        self.sizes, self.place = [mesh.size(axis) for axis in AXES], [mesh.rank(axis) for axis in AXES]
        together = [axis for axis in axes if mesh.size(axis) > 1]  # whose ranks train one model
        self._is_needed = bool(together) and dist.get_backend() not in _SHARED_GENERATORS
        self._groups = [mesh.group(axis) for axis in together if axis in _REPLICATED]
        self._is_pipeline = "pp" in together
        self._counts_passes = self._is_pipeline or bool(self._groups)
        self._own = [mesh.rank(axis) if axis in together else 0 for axis in ("pp", "dp")]
        self._base: int | None = None
        self._num_passes = 0
        self._buffer = torch.empty((), dtype=torch.int64, device="cpu")
        self._known: dict[int, int] = {}
        # A pass that finds the program's generators as the one before has the same number: most draw and hash nothing.
        self._seen: Sequence[torch.Tensor] = ()
        self._drawn, self._seed = 0, 0
        self._began: Sequence[torch.Tensor] = ()

    def __reduce__(self) -> Any:
        """Leave the streams out of copies and files of a model: they belong to the process groups of this job."""
        return type(None), ()

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Open the context that a forward pass runs in."""
        before = self.begin()
        try:
            yield
        finally:
            self.end(before)

    def begin(self) -> Sequence[torch.Tensor]:
        """Set the generators to the stream of the next pass; return their states before that."""
        if not self._is_needed:
            return ()
        before = _states(self._device)
        is_seen = _are_equal(self._seen, before)
        if not is_seen:
            self._drawn, self._seen = draw_number(self._buffer), before
        if self._counts_passes or not is_seen:
            number = self._number_of_pass() if self._counts_passes else self._drawn
            self._seed = stream_seed(number, *self._own)
        _seed(self._device, self._seed)
        if self._counts_passes or not is_seen:
            self._began = _states(self._device)
        return before

    def end(self, before: Sequence[torch.Tensor]) -> None:
        """Give the program its generators back."""
        if not self._is_needed:
            return
        drew = not _are_equal(self._began, _states(self._device))
        _restore(self._device, before)
        # As in one process, a pass that draws moves the program's generator. Stages of a pipeline, of which not all
        # draw, leave it alone: their ranks must still draw the same data.
        if drew and not self._is_pipeline:
            draw_number(self._buffer)
        # the next pass gets another number on all ranks, also where the program draws on some of them before it
        if not drew and self._known.get(self._drawn) == self._num_passes:
            del self._known[self._drawn]

    def _number_of_pass(self) -> int:
        if self._base is None:
            with uncounted():
                agreed = all_reduce_over(torch.tensor(self._drawn, device="cpu"), self._groups, "max")
            self._base = int(agreed)
        self._num_passes += 1
        number = self._num_passes
        if not self._is_pipeline:
            number = self._known.setdefault(self._drawn, number)
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return stream_seed(self._base, number)

    def state_dict(self) -> dict[str, Any]:
        """Return where the streams are, and whose they are."""
        return {"sizes": self.sizes, "place": self.place, "base": self._base, "passes": self._num_passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a rank of any mesh saved, the same one on all ranks that share activations."""
        self._base, self._num_passes = state.get("base"), state.get("passes", 0)
        self._known.clear()


@final
class TokenStream:
    """Lets ranks that hold different tokens of the same samples draw different numbers, until they hold all again."""

    def __init__(self, mesh: ParallelMesh, axis: Axis) -> None:
        self._device, self._rank = None if mesh.accelerator.is_cpu else mesh.accelerator, mesh.rank(axis)
        self._is_needed = mesh.size(axis) > 1 and dist.get_backend() not in _SHARED_GENERATORS
        self._replicated: Sequence[torch.Tensor] | None = None

    def enter(self) -> None:
        """Begin where tokens are sharded; a pass that is repeated begins with the same stream again."""
        if self._is_needed:
            number = draw_number()
            self._replicated = _states(self._device)
            _seed(self._device, stream_seed(number, self._rank))

    def leave(self) -> None:
        """Go on with the stream of the ranks that hold the same activations."""
        if self._replicated is not None:
            _restore(self._device, self._replicated)
            self._replicated = None


def _states(device: Accelerator | None) -> Sequence[torch.Tensor]:
    own = torch.default_generator.get_state()
    of_device = None if device is None else device.get_rng_state()
    return (own,) if of_device is None else (own, of_device)


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    if len(some) != len(others):
        return False
    for each, other in zip(some, others, strict=True):
        # a forward pass waits for it: torch compares these many small elements in twice the time of all else here
        if each.numel() != other.numel() or _compare_memory(each.data_ptr(), other.data_ptr(), each.numel()):
            return False
    return True


def _restore(device: Accelerator | None, states: Sequence[torch.Tensor]) -> None:
    torch.default_generator.set_state(states[0])
    if device is not None:
        for of_device in states[1:]:
            device.set_rng_state(of_device)


def _seed(device: Accelerator | None, seed: int) -> None:
    # Not torch.manual_seed, which seeds all devices, of which only this one is restored.
    torch.default_generator.manual_seed(seed)
    if device is not None:
        torch.get_device_module(device.name).manual_seed(seed)
