"""The moments that Adam keeps of each parameter, and where they are stored."""

import tempfile
from collections.abc import Generator, Iterator, MutableMapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from colossal._src.kernel import huge_zeros
from colossal._src.nn.optimizer.checked_optimizer import state_dtype
from colossal._src.offload import StateStore
from colossal._src.tensor import copy_placement, local_of
from colossal.errors import ConfigError, UnsupportedError

_BLOCK_NUMEL = 1 << 21
"""Two moments of a block are 16 MiB: long enough for efficient disk access, short enough to hold a few in memory."""


@final
class DiskSlice(NamedTuple):
    """Some elements of a parameter, with their moments."""

    param: torch.Tensor  # the parameter
    begin: int  # the first element, counted in its memory
    end: int  # the end (exclusive)
    means: list[torch.Tensor]  # exp_avg and exp_avg_sq of these elements; what is written to them goes to the disk


class _EntrySlice(NamedTuple):
    """Where some elements of a parameter are stored: the entry of a store, the offset in it, and the range."""

    entry: int
    at: int
    begin: int
    end: int


@final
class StatesOnDisk:
    """Moments that are stored in files instead of in memory, for a fraction of all parameters."""

    def __init__(self, directory: str | Path, fraction: float) -> None:
        self._directory, self._fraction = Path(directory), fraction
        self._seen: set[torch.Tensor] = set()
        self._stores: list[StateStore] = []
        self._locations: dict[torch.Tensor, tuple[int, list[_EntrySlice]]] = {}

    def __contains__(self, param: torch.Tensor) -> bool:
        return param in self._locations

    @property
    def num_bytes(self) -> int:
        """How many bytes of moments are on disk."""
        return sum(8 * local_of(param).numel() for param in self._locations)

    def choose(self, params: Sequence[torch.Tensor]) -> None:
        """Allocate zero moments for those parameters that are new."""
        new = [param for param in params if param not in self._seen]
        self._seen.update(new)
        total, taken, chosen = sum(local_of(param).numel() for param in new), 0, []
        for param in sorted(new, key=lambda each: -local_of(each).numel()):
            numel = local_of(param).numel()
            if numel and taken + numel <= self._fraction * total:
                _check(param)
                chosen.append(param)
                taken += numel
        if chosen:
            self._allocate([param for param in new if param in set(chosen)], taken)

    def _allocate(self, params: Sequence[torch.Tensor], total: int) -> None:
        """Concatenate the moments of parameters, and split them into entries of equal length."""
        numels = [min(_BLOCK_NUMEL, total - at) for at in range(0, total, _BLOCK_NUMEL)]
        self._stores.append(StateStore(self._directory, numels))
        first = 0
        for param in params:
            slices, begin, numel = [], 0, local_of(param).numel()
            while begin < numel:
                entry, at = divmod(first + begin, _BLOCK_NUMEL)
                end = min(numel, begin + _BLOCK_NUMEL - at)
                slices.append(_EntrySlice(entry, at, begin, end))
                begin = end
            self._locations[param] = len(self._stores) - 1, slices
            first += numel

    def walk(self, params: Sequence[torch.Tensor], *, is_read_only: bool = False) -> Iterator[list[DiskSlice]]:
        """Visit the moments of parameters, some slices at a time; changes to them are written back."""
        for number, store in enumerate(self._stores):
            wanted: dict[int, list[tuple[torch.Tensor, _EntrySlice]]] = {}
            for param in (each for each in params if self._locations[each][0] == number):
                for part in self._locations[param][1]:
                    wanted.setdefault(part.entry, []).append((param, part))
            with closing(store.walk(list(wanted), is_read_only=is_read_only)) as visits:  # type: ignore[type-var]
                for entry, means in visits:
                    yield [_disk_slice(param, part, means) for param, part in wanted[entry]]

    def load(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Read the moments of one parameter."""
        means = [torch.empty(local_of(param).shape, dtype=torch.float32, device="cpu") for _ in range(2)]
        for (stored,) in self.walk([param], is_read_only=True):
            for mean, part in zip(means, stored.means, strict=True):
                mean.view(-1)[stored.begin : stored.end] = part
        return means

    def store(self, param: torch.Tensor, means: Sequence[torch.Tensor]) -> None:
        """Write the moments of one parameter, such as those of a checkpoint."""
        for (stored,) in self.walk([param]):
            for mean, part in zip(means, stored.means, strict=True):
                part.copy_(mean.reshape(-1)[stored.begin : stored.end])

    def close(self) -> None:
        """Free the disk space."""
        for store in self._stores:
            store.close()


def _disk_slice(param: torch.Tensor, part: _EntrySlice, means: Sequence[torch.Tensor]) -> DiskSlice:
    length = part.end - part.begin
    return DiskSlice(param, part.begin, part.end, [mean[part.at : part.at + length] for mean in means])


def _check(param: torch.Tensor) -> None:
    local = local_of(param)
    if local.device.type != "cpu" or state_dtype(param) != torch.float32 or not local.is_contiguous():
        raise UnsupportedError(
            "State on disk is for contiguous parameters of at most 32 bits in host memory. Found one in "
            f"{local.dtype} on {local.device}{'' if local.is_contiguous() else ', not contiguous'}. Leave "
            "nvme_offload_fraction out, or update on the host, as LowLevelZeroPlugin(cpu_offload=True) does."
        )


def make_disk_states(fraction: float, folder: str | None) -> StatesOnDisk | None:
    """Make the store for the fraction of the moments that is on disk; None for none."""
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(
            f"nvme_offload_fraction is a fraction from 0 to 1. Found {fraction!r}. Pass 1.0 to keep the entire state "
            "on disk."
        )
    if not fraction:
        return None
    directory = Path(folder or tempfile.gettempdir())
    if not directory.is_dir():
        raise ConfigError(
            f"State on disk needs a folder that exists. Found nvme_offload_dir={folder!r}. Make it, on a fast disk."
        )
    return StatesOnDisk(directory, fraction)


MOMENTS = ("exp_avg", "exp_avg_sq")


@final
class ParamMoments(NamedTuple):
    """A parameter, or some elements of it, with its means."""

    param: torch.Tensor  # the parameter
    exp_avg: torch.Tensor  # the mean of its gradients
    exp_avg_sq: torch.Tensor  # the mean of their squares
    part: slice | None = None  # which elements of the parameter they are of, counted in its memory; None for all


@final
class AdamStates:
    """Makes the means of parameters, and hands them out for a step.

    They are on the device of the parameter; those on the CPU are allocated from huge pages, or are on disk.
    """

    def __init__(self, state: MutableMapping[torch.Tensor, Any], disk: StatesOnDisk | None = None) -> None:
        self._state, self._disk = state, disk

    def count(self, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
        """Count a step of each parameter, and make the state of those that have none."""
        self._make([param for param in params if not self._state.get(param)])
        steps = [self._state[param]["step"] for param in params]
        if steps:
            torch._foreach_add_(steps, 1)
        return {param: int(step) for param, step in zip(params, steps, strict=True)}

    def batches(self, params: Sequence[torch.Tensor]) -> Iterator[list[ParamMoments]]:
        """Hand out the means, some parameters after others; what is written to them until the next batch is kept."""
        away = [param for param in params if self._is_offloaded(param)]
        self.offload(away)
        # a step that fails must end the walk: a store serves one at a time
        with closing(self._visit(away)) as visits:
            first = next(visits, None)  # which begins to read, while those in memory are computed with
            yield [self._held(param) for param in params if not self._is_offloaded(param)]
            if first is not None:
                yield first
            yield from visits

    def offload(self, params: Sequence[torch.Tensor]) -> None:
        """Bring means that somebody put into memory, such as a checkpoint, to the disk."""
        for param in params:
            entry = self._state.get(param, {})
            if self._disk is not None and param in self._disk and MOMENTS[0] in entry:
                self._disk.store(param, [local_of(entry.pop(name)) for name in MOMENTS])

    def _is_offloaded(self, param: torch.Tensor) -> bool:
        return self._disk is not None and param in self._disk

    def _visit(self, params: Sequence[torch.Tensor]) -> Generator[list[ParamMoments], None, None]:
        for slices in self._disk.walk(params) if self._disk is not None and params else ():
            yield [
                ParamMoments(each.param, each.means[0], each.means[1], slice(each.begin, each.end)) for each in slices
            ]

    def _held(self, param: torch.Tensor) -> ParamMoments:
        return ParamMoments(param, self._mean(param, MOMENTS[0]), self._mean(param, MOMENTS[1]))

    def _mean(self, param: torch.Tensor, name: str) -> torch.Tensor:
        entry = self._state[param]
        if entry[name].dtype != state_dtype(param):  # somebody cast it as torch does
            entry[name] = copy_placement(entry[name].to(state_dtype(param)), param)
        return entry[name]

    def _make(self, params: Sequence[torch.Tensor]) -> None:
        zeros = iter(_zeros_like([param for param in params if not self._is_offloaded(param) for _ in MOMENTS]))
        for param in params:
            means = {} if self._is_offloaded(param) else {name: copy_placement(next(zeros), param) for name in MOMENTS}
            # on the host: each step reads the number, and would wait for a device
            self._state[param] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), **means}


def _zeros_like(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros in the dtype of the state; those on the CPU in one allocation for each dtype."""
    found: list[torch.Tensor | None] = [None] * len(params)
    for dtype in (torch.float32, torch.float64):
        at = [i for i, param in enumerate(params) if _is_plain(param) and state_dtype(param) == dtype]
        for i, zeros in zip(at, huge_zeros([params[i].shape for i in at], dtype), strict=True):
            found[i] = zeros
    return [
        torch.zeros_like(param, dtype=state_dtype(param), memory_format=torch.contiguous_format)
        if zeros is None
        else zeros
        for param, zeros in zip(params, found, strict=True)
    ]


def _is_plain(param: torch.Tensor) -> bool:
    return param.device.type == "cpu" and type(param) in (torch.Tensor, torch.nn.Parameter)
