"""Chunks: which parameters are in one flat buffer, and the size of these buffers.

A chunk that is too long is mostly empty at its end, one that is too short has a gap after every few parameters. The
wasted memory is not monotonic in the size, so that the best size is found by trying many
(Fang et al., "PatrickStar", https://arxiv.org/abs/2108.05818).

The result depends on nothing but the order, shapes, kinds and names of the parameters, and on the number of ranks; thus
it is the same on all ranks, without communication. Parameters stay where they are, and nothing is read from them.
"""

import math
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
from torch import distributed as dist
from torch import nn

from colossal.errors import ConfigError
from colossal.logging import get_dist_logger


class ParameterOrder(Protocol):
    """What knows in which order a model uses its parameters.

    Example:
        >>> from colossal.zero.gemini import ParameterOrder
        >>> class Backwards(ParameterOrder):
        ...     param_order = ("last", "first")
        >>> Backwards().param_order[0]
        'last'
    """

    @property
    def param_order(self) -> Sequence[nn.Parameter]:
        """The parameters, the one that is used first in front."""
        ...


_MEBI = 1 << 20
_ALIGNMENT = 16  # elements of each rank's segment of a chunk that is as long as the model
_BLOCK = 1 << 15  # candidates that are tried at a time, so that what they take stays in the cache
# longer than any chunk: a parameter that is never packed with others
_NEVER = 1 << 62
_TIED_FRACTION = 4

_Numels = npt.NDArray[np.int64]
_ParamSize = tuple[int, int]  # the elements of a parameter, and the shortest chunk that it is in together with others


@final
@dataclass(frozen=True)
class ChunkUsage:
    """How much of a model's chunks holds parameters; as text it is what the search logs.

    Args:
        chunk_numel: The elements of a chunk.
        used_numel: The elements of all parameters.
        wasted_numel: The elements of all chunks that hold none.

    Example:
        >>> from colossal.zero.gemini import ChunkUsage
        >>> ChunkUsage(chunk_numel=1024, used_numel=1536, wasted_numel=512).wasted_percentage
        25.0
    """

    chunk_numel: int
    used_numel: int
    wasted_numel: int

    @property
    def wasted_percentage(self) -> float:
        """How many of a hundred elements in chunks hold no parameter."""
        return 100.0 * self.wasted_numel / max(self.used_numel + self.wasted_numel, 1)

    def __str__(self) -> str:
        return (
            f"Chunks of {self.chunk_numel:,} elements: parameters fill {self.used_numel / _MEBI:.2f} Mi elements, "
            f"{self.wasted_numel / _MEBI:.2f} Mi stay empty ({self.wasted_percentage:.2f} % of all)."
        )


def search_chunk_configuration(
    model: nn.Module,
    search_range_m: float,
    search_interval: int,
    min_chunk_size_m: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
    process_group: dist.ProcessGroup | None = None,
    memstas: ParameterOrder | None = None,
    *,
    separate: Container[nn.Parameter] = (),
    verbose: bool = False,
) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Find the chunk size that leaves the fewest elements empty, the smallest of several.

    Each size that is tried is rounded up to a multiple of the number of ranks, and at least as large as the largest
    parameter that is looked at. A model with fewer elements than that gets chunks as long as itself, a multiple of 16
    elements on each rank. A tied parameter that is longer than a quarter of a chunk gets a chunk for itself.

    Args:
        model: Its parameters are to be put into chunks; they may be on the meta device.
        search_range_m: How far above the smallest size is searched, in units of 2**20 elements.
        search_interval: The distance of the sizes that are tried, in elements; such as the hidden size.
        min_chunk_size_m: The smallest size, in units of 2**20 elements; at least 0.
        filter_exlarge_params: Choose the size without parameters of more than three standard deviations above the mean.
        strict_ddp_flag: Keep full chunks on every rank; nothing counts as wasted, and the smallest size is chosen.
        process_group: The ranks over which chunks are sharded; by default all, or one if there is no process group.
        memstas: Knows the order in which the parameters are used; that of `model.parameters()` by default.
        separate: Parameters that get a chunk for themselves, whatever its size, in addition to the tied ones.
        verbose: Log on rank 0 what is used and wasted.

    Returns:
        ``{size: {"chunk_size": elements, "keep_gathered": strict_ddp_flag}}``, under the number of ranks over which
        chunks are sharded; the elements of all parameters; the elements of their chunks that hold none.

    Raises:
        ConfigError: A number is outside its range, the model has no parameters, `memstas` knows others than the
            model's, or this rank is not in the group.

    Example:
        >>> from torch import nn
        >>> from colossal.zero.gemini import search_chunk_configuration
        >>> model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)).to("meta")
        >>> search_chunk_configuration(model, 1, 1024, min_chunk_size_m=1)
        ({1: {'chunk_size': 2002944, 'keep_gathered': False}}, 2002000, 944)
    """
    _check_search(search_range_m, search_interval, min_chunk_size_m)
    dp_size, apart = _dp_size(process_group), _as_container(separate)
    parameters = ordered_parameters(model, memstas)
    searched = _without_exlarge(parameters) if filter_exlarge_params else parameters
    total, smallest = _total(parameters), round(min_chunk_size_m * _MEBI)
    size = _padded(max(total, 1), dp_size * _ALIGNMENT)
    if total >= smallest:
        sizes = _sizes(smallest, search_range_m, search_interval, [each for each in searched if each not in apart])
        sizes = sizes[: 1 if strict_ddp_flag else None]
        size = _best_size(sizes, _param_sizes(searched, set(_tied(model)), apart), dp_size)
    wasted = 0 if strict_ddp_flag else _waste(model, parameters, size, dp_size, apart)
    if verbose:
        get_dist_logger().info(ChunkUsage(size, total, wasted), ranks=[0])
    return {dp_size: {"chunk_size": size, "keep_gathered": strict_ddp_flag}}, total, wasted


def _sizes(smallest: int, range_m: float, interval: int, parameters: Sequence[nn.Parameter]) -> range:
    """The sizes that are tried: none below the largest of the parameters that are not separate."""
    smallest = max(smallest, *(each.numel() for each in parameters), 1)
    return range(smallest, smallest + round(range_m * _MEBI) + 1, interval)


def ordered_parameters(model: nn.Module, memstas: ParameterOrder | None = None) -> list[nn.Parameter]:
    """List the parameters of a model in the order in which they are put into chunks, each of them once."""
    parameters = dict.fromkeys(model.parameters())
    if not parameters:
        raise ConfigError(
            f"Chunks are made of the parameters of a model. Found none in {type(model).__name__}. "
            "Pass the model before its parameters are taken away, or train it without chunks."
        )
    first = dict.fromkeys(memstas.param_order if memstas is not None else ())
    foreign = [tuple(parameter.shape) for parameter in first if parameter not in parameters]
    if foreign:
        raise ConfigError(
            "The order of use must consist of parameters of the model. Found "
            f"{len(foreign)} others, the first of shape {foreign[0]}. Record the order with the same model object."
        )
    return list(first | parameters)


def unshared_parameters(model: nn.Module, chunk_numel: int) -> set[nn.Parameter]:
    """Return the tied parameters that are so long that each gets a chunk for itself.

    A tied parameter is used in several layers of the model, often the first and the last. Other parameters of its chunk
    would have to stay gathered all the time in between, so that it gets a chunk for itself, unless it is short.

    Args:
        model: Its parameters are to be put into chunks.
        chunk_numel: The elements of a chunk.

    Returns:
        The tied parameters that are longer than a quarter of a chunk.

    Example:
        >>> from torch import nn
        >>> from colossal.zero.gemini import unshared_parameters
        >>> model = nn.Sequential(nn.Embedding(100, 10), nn.Linear(10, 100, bias=False))
        >>> model[1].weight = model[0].weight
        >>> len(unshared_parameters(model, chunk_numel=2048)), len(unshared_parameters(model, chunk_numel=8192))
        (1, 0)
    """
    return {parameter for parameter in _tied(model) if _TIED_FRACTION * parameter.numel() > chunk_numel}


def pack_parameters(
    parameters: Iterable[nn.Parameter], chunk_numel: int, *, separate: Container[nn.Parameter] = ()
) -> list[list[nn.Parameter]]:
    """Put parameters into chunks, one after the other.

    A chunk holds parameters of one dtype, of one type of device, and either with gradients or without. Of each such
    kind one chunk is open. A parameter that does not fit into it closes it, and begins the next one. A parameter that
    is longer than a chunk, or is in `separate`, gets one for itself; the open one stays open.

    Args:
        parameters: What is put into chunks, in this order.
        chunk_numel: The elements of a chunk; at least 1.
        separate: Parameters that get a chunk for themselves.

    Returns:
        The parameters of each chunk.

    Raises:
        ConfigError: `chunk_numel` is below 1.

    Example:
        >>> from torch import nn
        >>> from colossal.zero.gemini import pack_parameters
        >>> model = nn.Linear(10, 5)
        >>> [len(run) for run in pack_parameters(model.parameters(), chunk_numel=64)]
        [2]
        >>> [len(run) for run in pack_parameters(model.parameters(), chunk_numel=52)]
        [1, 1]
    """
    if chunk_numel < 1:
        raise ConfigError(
            f"A chunk must have room for at least one element. Found chunk_numel={chunk_numel}. "
            "Pass the size that search_chunk_configuration found."
        )
    apart = _as_container(separate)
    runs: list[list[nn.Parameter]] = []
    open_runs: dict[Hashable, tuple[list[nn.Parameter], int]] = {}
    for parameter in dict.fromkeys(parameters):
        numel, kind = parameter.numel(), _kind(parameter)
        if numel > chunk_numel or parameter in apart:
            runs.append([parameter])
            continue
        run, used = open_runs.get(kind, ([], 0))
        if not run or used + numel > chunk_numel:
            run, used = [], 0
            runs.append(run)
        run.append(parameter)
        open_runs[kind] = run, used + numel
    return runs


def allocated_numel(
    run: Sequence[nn.Parameter], chunk_numel: int, dp_size: int, *, separate: Container[nn.Parameter] = ()
) -> int:
    """Return the length of the buffer of one chunk."""
    if len(run) == 1 and (run[0].numel() > chunk_numel or run[0] in _as_container(separate)):
        return _padded(run[0].numel(), dp_size)
    return chunk_numel


def _check_search(search_range_m: float, search_interval: int, min_chunk_size_m: float) -> None:
    if not (math.isfinite(search_range_m) and search_range_m >= 0):
        raise ConfigError(
            f"search_range_m must be a finite number of at least 0. Found {search_range_m!r}. "
            "The default of the plugin is 32, which is 2**25 elements."
        )
    if isinstance(search_interval, bool) or not isinstance(search_interval, int) or search_interval < 1:
        raise ConfigError(
            f"search_interval must be an integer of at least 1. Found {search_interval!r}. "
            "Pass the hidden size of the model, or 1024."
        )
    if not (math.isfinite(min_chunk_size_m) and min_chunk_size_m >= 0):
        raise ConfigError(
            f"min_chunk_size_m must be a finite number of at least 0. Found {min_chunk_size_m!r}. "
            "The default is 32, which is 2**25 elements."
        )


def _dp_size(process_group: dist.ProcessGroup | None) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    size = dist.get_world_size(process_group)
    if size < 1:
        raise ConfigError(
            "Chunk sizes are searched by the ranks that hold the shards. Found that this rank is not in process_group. "
            "Pass the group of this rank."
        )
    return size


def _as_container(separate: Container[nn.Parameter]) -> Container[nn.Parameter]:
    """Return a container that finds parameters by identity: a list would compare their values."""
    return frozenset(separate) if isinstance(separate, Iterable) else separate


def _kind(parameter: nn.Parameter) -> Hashable:
    return parameter.dtype, parameter.requires_grad, parameter.device.type


def _total(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _tied(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that have several names."""
    counts: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[parameter] = counts.get(parameter, 0) + 1
    return [parameter for parameter, count in counts.items() if count > 1]


def _without_exlarge(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Leave those out that are more than three standard deviations above the mean; in integers, thus the same anywhere.

    With n numbers of sum s and square sum q, `x > s/n + 3 sqrt(q/n - (s/n)^2)` says the same as what stands below.
    """
    numels = [parameter.numel() for parameter in parameters]
    count, summed, squares = len(numels), sum(numels), sum(numel * numel for numel in numels)
    bound = 9 * (count * squares - summed * summed)
    excess = [max(count * numel - summed, 0) for numel in numels]
    return [parameter for parameter, above in zip(parameters, excess, strict=True) if above * above <= bound]


def _param_sizes(
    parameters: Iterable[nn.Parameter], tied: Container[nn.Parameter], separate: Container[nn.Parameter]
) -> list[list[_ParamSize]]:
    """Return what the search must know of the parameters of each kind."""
    kinds: dict[Hashable, list[_ParamSize]] = {}
    for parameter in parameters:
        numel = parameter.numel()
        fits_from = _NEVER if parameter in separate else _TIED_FRACTION * numel if parameter in tied else numel
        kinds.setdefault(_kind(parameter), []).append((numel, fits_from))
    return list(kinds.values())


def _best_size(candidates: range, kinds: Sequence[Sequence[_ParamSize]], dp_size: int) -> int:
    """Find the size for which the chunks are the shortest together, the smallest such size."""
    best: list[tuple[int, int]] = []
    for start in range(0, len(candidates), _BLOCK):
        block = candidates[start : start + _BLOCK]
        sizes = np.arange(block.start, block.stop, block.step, dtype=np.int64)
        sizes += -sizes % dp_size
        allocated = sum((_allocated(kind, sizes, dp_size) for kind in kinds), np.zeros_like(sizes))
        index = int(allocated.argmin())  # the first of several
        best.append((int(allocated[index]), int(sizes[index])))
    return min(best)[1]


def _allocated(param_sizes: Sequence[_ParamSize], sizes: _Numels, dp_size: int) -> _Numels:
    """Do what `pack_parameters` does to one kind of parameters, for all sizes at once, and add up the buffers."""
    own, counts = np.zeros_like(sizes), np.zeros_like(sizes)
    left = np.full_like(sizes, -1)  # nothing fits where no chunk is open, not even nothing
    for numel, fits_from in param_sizes:
        first = int(np.searchsorted(sizes, fits_from))  # from here on the parameter is packed with others
        own[:first] += _padded(numel, dp_size)
        rest = left[first:]
        rest -= numel
        overflows = rest < 0
        counts[first:] += overflows
        np.subtract(sizes[first:], numel, out=rest, where=overflows)
    return own + counts * sizes


def _waste(
    model: nn.Module, parameters: Sequence[nn.Parameter], size: int, dp_size: int, separate: Container[nn.Parameter]
) -> int:
    apart = {parameter for parameter in parameters if parameter in separate} | unshared_parameters(model, size)
    runs = pack_parameters(parameters, size, separate=apart)
    allocated = sum(allocated_numel(run, size, dp_size, separate=apart) for run in runs)
    return allocated - _total(parameters)
