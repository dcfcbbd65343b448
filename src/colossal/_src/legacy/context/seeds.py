"""A random generator for each parallel mode: the same on replicas, another one on each tensor-parallel rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, ambient_mesh, current_mesh
from colossal._src.legacy.context.parallel_mode import ParallelMode
from colossal.accelerator import Accelerator, get_accelerator
from colossal.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_STAGE_STEP = 1024  # between the seeds of pipeline stages; more than ranks of tensor parallelism

State = tuple[torch.Tensor, ...]
"""Of the generators of the host and of the device."""


class _Seeds:
    """The seeds and the states of one process."""

    def __init__(self) -> None:
        self.seeds: dict[ParallelMode, int] = {}
        self.states: dict[ParallelMode, State] = {}
        self.mode: ParallelMode | None = None


class _NoMesh:
    """Stands for the mesh of a process that has found no others."""


_ALONE = _NoMesh()
_SEEDS: WeakKeyDictionary[ParallelMesh | _NoMesh, _Seeds] = WeakKeyDictionary()


def add_seed(parallel_mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
    """Give a mode a generator.

    Args:
        parallel_mode: The mode.
        seed: Its seed.
        overwrite: Whether it may have one already.

    Raises:
        ConfigError: It has one already.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import add_seed, get_seeds
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     add_seed(ParallelMode.PIPELINE, 3)
        ...     print(get_seeds()[ParallelMode.PIPELINE])
        3
    """
    own = _own()
    if parallel_mode in own.seeds and not overwrite:
        raise ConfigError(
            f"A mode has one seed. Found {own.seeds[parallel_mode]} for {parallel_mode}. Pass overwrite=True."
        )
    outer = _read_state()
    torch.manual_seed(seed)
    own.seeds[parallel_mode], own.states[parallel_mode] = seed, _read_state()
    _write_state(outer)


def set_seeds(seed: int) -> None:
    """Give DATA and TENSOR their generators: one for all ranks of a stage, and one for each tensor-parallel rank."""
    mesh = current_mesh()
    stage = seed + _STAGE_STEP * mesh.rank("pp")
    add_seed(ParallelMode.DATA, stage, overwrite=True)
    if mesh.size("tp") * mesh.size("sp") > 1:
        add_seed(ParallelMode.TENSOR, stage + 1 + mesh.rank("tp") + mesh.rank("sp"), overwrite=True)


def get_seeds() -> dict[ParallelMode, int]:
    """Return the seed of each mode.

    Returns:
        The seeds by mode; after a launch those of DATA, and of TENSOR where layers are sharded.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import get_seeds
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     print(sorted(mode.name for mode in get_seeds()))
        ['DATA', 'TENSOR']
    """
    return dict(_own().seeds)


def get_states(copy: bool = False) -> dict[ParallelMode, State]:
    """Return the state of each mode's generator.

    Args:
        copy: Whether to copy them.

    Returns:
        The states by mode: that of the host, and that of the device if it has another.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import get_states
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     print(len(get_states(copy=True)[ParallelMode.DATA]))  # a CPU has one generator
        1
    """
    states = _own().states
    return {mode: tuple(part.clone() for part in state) for mode, state in states.items()} if copy else dict(states)


def get_current_mode() -> ParallelMode | None:
    """Return the mode whose generator is in use.

    Returns:
        The mode; None outside of all.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import get_current_mode, seed
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     print(get_current_mode())
        ...     with seed(ParallelMode.TENSOR):
        ...         print(get_current_mode())
        None
        ParallelMode.TENSOR
    """
    return _own().mode


def set_mode(parallel_mode: ParallelMode) -> None:
    """Use the generator of a mode from now on.

    Args:
        parallel_mode: The mode.

    Raises:
        ConfigError: The mode has no generator.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import get_current_mode, set_mode
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     set_mode(ParallelMode.DATA)
        ...     print(get_current_mode())
        ParallelMode.DATA
    """
    own = _own()
    sync_states()
    _write_state(_state_of(parallel_mode))
    own.mode = parallel_mode


def set_seed_states(parallel_mode: ParallelMode, state: State) -> None:
    """Set the state of a mode's generator.

    Args:
        parallel_mode: The mode.
        state: The state, as of `get_states`.

    Raises:
        ConfigError: The mode has no generator.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import get_states, seed, set_seed_states
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     before = get_states(copy=True)[ParallelMode.TENSOR]
        ...     with seed(ParallelMode.TENSOR):
        ...         first = torch.rand(())
        ...     set_seed_states(ParallelMode.TENSOR, before)
        ...     with seed(ParallelMode.TENSOR):
        ...         print(torch.equal(torch.rand(()), first))
        True
    """
    _state_of(parallel_mode)
    _own().states[parallel_mode] = state


def sync_states() -> None:
    """Keep the state of the generator in use as that of its mode.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import get_states, set_mode, sync_states
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     set_mode(ParallelMode.DATA)
        ...     _ = torch.rand(())
        ...     before = get_states(copy=True)[ParallelMode.DATA]
        ...     sync_states()
        ...     print(torch.equal(before[0], get_states()[ParallelMode.DATA][0]))
        False
    """
    own = _own()
    if own.mode is not None:
        own.states[own.mode] = _read_state()


@contextmanager
def seed(parallel_mode: ParallelMode) -> Iterator[None]:
    """Draw from the generator of a mode inside.

    Args:
        parallel_mode: For example TENSOR, where tensor-parallel ranks must draw different values.

    Yields:
        Nothing.

    Raises:
        ConfigError: The mode has no generator.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import seed
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     outside = torch.get_rng_state()
        ...     with seed(ParallelMode.TENSOR):
        ...         _ = torch.rand(())
        ...     print(torch.equal(torch.get_rng_state(), outside))
        True
    """
    own = _own()
    outer_mode, outer = own.mode, _read_state()
    _write_state(_state_of(parallel_mode))
    own.mode = parallel_mode
    try:
        yield
    finally:
        own.states[parallel_mode] = _read_state()
        own.mode = outer_mode
        _write_state(outer)


def with_seed(func: Callable[_P, _T], parallel_mode: ParallelMode) -> Callable[_P, _T]:
    """Make a function draw from the generator of a mode.

    Args:
        func: The function.
        parallel_mode: The mode.

    Returns:
        A function of the same arguments.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import with_seed
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     outside = torch.get_rng_state()
        ...     _ = with_seed(torch.rand, ParallelMode.TENSOR)(3)
        ...     print(torch.equal(torch.get_rng_state(), outside))
        True
    """

    @wraps(func)
    def seeded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with seed(parallel_mode):
            return func(*args, **kwargs)

    return seeded


def reset_seeds() -> None:
    """Forget all generators of modes.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelMode
        >>> from colossal.legacy.context.random import add_seed, get_seeds, reset_seeds
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), ParallelMesh(tp=2):
        ...     add_seed(ParallelMode.PIPELINE, 3)
        ...     reset_seeds()
        ...     print(ParallelMode.PIPELINE in get_seeds())
        False
    """
    _SEEDS.pop(_mesh(), None)


def _mesh() -> ParallelMesh | _NoMesh:
    return current_mesh() if dist.is_initialized() or ambient_mesh() is not None else _ALONE


def _own() -> _Seeds:
    mesh = _mesh()
    if mesh not in _SEEDS:
        _SEEDS[mesh] = _Seeds()
        if mesh is not _ALONE:
            set_seeds(torch.initial_seed())
    return _SEEDS[mesh]


def _accelerator() -> Accelerator:
    mesh = _mesh()
    return get_accelerator() if isinstance(mesh, _NoMesh) else mesh.accelerator


def _state_of(mode: ParallelMode) -> State:
    states = _own().states
    if mode not in states:
        there = ", ".join(each.name for each in states)
        raise ConfigError(f"A mode has a generator after add_seed. Found {mode}; there are {there}. Add a seed for it.")
    return states[mode]


def _read_state() -> State:
    device = _accelerator().get_rng_state()
    return (torch.get_rng_state(),) if device is None else (torch.get_rng_state(), device)


def _write_state(state: State) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        _accelerator().set_rng_state(state[1])
