"""The mesh that the entry ``parallel`` of a config describes.

====================================================  ==================================================================
entry                                                 meaning
====================================================  ==================================================================
``pipeline=2`` or ``dict(size=2)``                    two stages
``tensor=dict(size=4, mode="2d")``, ``depth=`` too    the tp axis, as one of 1d, 2d, 2.5d and 3d
``tensor=dict(size=4, mode="sequence")``              the sp axis
``tensor=dict(size=4, mode=...)`` of `OWN_MODES`      the tp axis, whose groups the program forms itself
``moe=dict(size=2)``                                  the ep axis: experts are sharded over consecutive ranks of a stage
``data=2``                                            checked: what remains is data-parallel
====================================================  ==================================================================

Replicas are outermost and tensor parallelism innermost: ranks count along tp, then pp, then dp.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from colossal._src.cluster.config import Config
from colossal._src.cluster.tp_grid import TENSOR_PARALLEL_MODES
from colossal.errors import ConfigError, MeshError

OWN_MODES: dict[str, str] = {}
"""The modes of tensor parallelism that the program has defined, and the names of the classes that form the groups."""

_FORMERS: list[Callable[[Config, int | None], None]] = []

_SEQUENCE = "sequence"
_KEYS = ("data", "pipeline", "tensor", "sequence", "moe")


def mesh_options(config: Config, world_size: int) -> dict[str, Any]:
    """The arguments of `ParallelMesh` for a config.

    Args:
        config: All of it; nothing is read but ``parallel``.
        world_size: Number of processes.

    Returns:
        The keyword arguments; none without an entry ``parallel``.

    Raises:
        ConfigError: An entry is unknown, has no size, or contradicts another.
        MeshError: The sizes do not fit the number of processes.
    """
    parallel = config.get("parallel")
    if parallel is None:
        return {}
    if not isinstance(parallel, Mapping):
        raise ConfigError(f"parallel is a dict with {', '.join(_KEYS)}. Found {parallel!r}. Write parallel=dict(...).")
    entries = cast("Mapping[str, Any]", parallel)
    if unknown := [key for key in entries if key not in _KEYS]:
        raise ConfigError(f"parallel has the entries {', '.join(_KEYS)}. Found {unknown}. Take them out.")
    options: dict[str, Any] = {"pp": _size_of("pipeline", entries), "sp": _size_of("sequence", entries)}
    options |= _tensor_options(entries)
    wanted = _size_of("data", entries) if entries.get("data") is not None else None
    _check_product(options, wanted, world_size)
    experts = _size_of("moe", entries)
    return {**options, **({"ep": experts} if experts > 1 else {}), "dp_outside": True}


def form_own_mode(config: Config, seed: int | None = None) -> None:
    """Let a mode of tensor parallelism that the program has defined form its groups, on the ambient mesh.

    A seed, if there is one, is set for these groups too.

    Communication: what the mode does; all ranks call.
    """
    parallel = cast("Mapping[str, Any]", config.get("parallel") or {})
    tensor = parallel.get("tensor")
    if isinstance(tensor, Mapping) and cast("Mapping[str, Any]", tensor).get("mode") in OWN_MODES:
        assert _FORMERS, "who adds a mode has the module that forms it"
        _FORMERS[-1](config, seed)


def form_own_modes_by(former: Callable[[Config, int | None], None]) -> None:
    """Set what forms the groups of the program's own modes."""
    _FORMERS.append(former)


def _tensor_options(entries: Mapping[str, Any]) -> dict[str, Any]:
    tensor = entries.get("tensor")
    size = _size_of("tensor", entries)
    mode = cast("Mapping[str, Any]", tensor).get("mode") if isinstance(tensor, Mapping) else None
    if mode is None and size > 1:
        raise ConfigError(
            f"Tensor parallelism has a mode. Found parallel.tensor={tensor!r}. Write "
            f"tensor=dict(size={size}, mode='1d'), or another of {', '.join(_all_modes())}."
        )
    if mode is None or (size == 1 and mode not in OWN_MODES):
        return {"tp": size}
    if mode == _SEQUENCE:
        if _size_of("sequence", entries) not in {1, size}:
            raise ConfigError(
                f"A sequence is sharded by one size. Found parallel.sequence={entries['sequence']!r} and "
                f"parallel.tensor={tensor!r}. Write one of them."
            )
        return {"sp": size}
    if mode not in _all_modes():
        raise ConfigError(
            f"The modes of tensor parallelism are {', '.join(_all_modes())}. Found {mode!r}. Write one of them, or "
            "add your own to colossal.constants.INITIALIZER_MAPPING before the launch."
        )
    if mode in OWN_MODES:
        return {"tp": size}
    return {"tp": size, "tp_mode": mode, "tp_depth": cast("Mapping[str, Any]", tensor).get("depth")}


def _all_modes() -> tuple[str, ...]:
    return (*TENSOR_PARALLEL_MODES, _SEQUENCE, *OWN_MODES)


def _size_of(key: str, entries: Mapping[str, Any]) -> int:
    entry = entries.get(key)
    size = cast("Mapping[str, Any]", entry).get("size", 1) if isinstance(entry, Mapping) else entry
    size = 1 if size is None else size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            f"The size of parallel.{key} is an integer, at least 1. Found {entry!r}. Write {key}=dict(size=2)."
        )
    return size


def _check_product(options: Mapping[str, Any], data: int | None, world_size: int) -> None:
    taken = options["pp"] * options["sp"] * options["tp"] if "tp" in options else options["pp"] * options["sp"]
    left, remainder = divmod(world_size, taken)
    if remainder or (data is not None and data != left):
        sizes = " x ".join(f"{axis} {options[axis]}" for axis in ("pp", "sp", "tp") if axis in options)
        named = "" if data is None else f" x data {data}"
        raise MeshError(
            f"The sizes of parallel must multiply to the number of processes. Found {sizes}{named} in a job of "
            f"{world_size}. Change a size, leave data out, or start {taken * (data or max(1, left))} processes."
        )
