"""The base class of layers that hold a shard of the parameters of a serial module."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal._src.nn.layer.tp.arguments import Initializer, initialize
from colossal._src.tensor import Layout, Placement, relayout, set_placement, shard
from colossal.errors import ConfigError


class ParallelLayer(torch.nn.Module, ABC):
    """A layer that is sharded along the tp axis of a mesh.

    Its parameters are those of a serial module, its native module: initialized as that initializes them, from the
    random state of the first rank, which all ranks of the axis use from then on; and then sharded. So the full
    parameters are the same on every mesh.

    Args:
        mesh: The mesh, or None for one rank that has everything.

    Attributes:
        mesh: The mesh, or None.
        layouts: The layout of each parameter, by its name.

    Communication: when it is built, broadcast, tp, 5 KB of the state of the random numbers.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn import Linear
        >>> from colossal.nn import ParallelLayer
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=1), ParallelMesh(tp=4, tp_mode="2d"):
        ...     layer = Linear.from_native(torch.nn.Linear(4, 8))
        >>> isinstance(layer, ParallelLayer), str(layer.layouts["weight"]), tuple(layer.weight.shape)
        (True, 'S1S0', (4, 2))
    """

    def __init__(self, mesh: ParallelMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.layouts: Mapping[str, Layout] = {}

    @classmethod
    def from_native(cls, native: torch.nn.Module, mesh: ParallelMesh | None = None, **options: Any) -> Self:
        """Take the parameters of a serial module.

        Args:
            native: The module; the same on all ranks, which is not checked. If it was built inside of
                `colossal.lazy.LazyInitContext`, parameters are materialized, sharded and freed one after the other;
                of those that are stored in files, only this rank's shards are read.
            mesh: The mesh; the ambient one by default.
            **options: Further arguments of the layer.

        Returns:
            A layer with this rank's shards of them, in new tensors.

        Raises:
            ConfigError: This layer cannot be made from such a module.
        """
        arguments = cls._arguments_of(native)
        dtype = next((parameter.dtype for parameter in native.parameters()), None)
        # On the meta device, as its own initial values would be replaced at once.
        layer = cls(**{"dtype": dtype, **arguments, **options, "mesh": mesh, "device": "meta"})
        layer._take(native)
        return layer.train(native.training)

    def to_native(self) -> torch.nn.Module:
        """Make the serial module with the full parameters, on all ranks.

        Returns:
            The module, as it would be on one rank.

        Communication: all_gather, the axes that shard the parameters, their bytes.
        """
        native = self._make_native("meta")
        for name, local in self._parameters.items():
            if local is not None:
                # A copy: where nothing is sharded, the full parameter is the memory of this layer.
                full = torch.nn.Parameter(self.full_parameter(name).clone(), local.requires_grad)
                native.register_parameter(name, full)
        return native.train(self.training)

    def full_parameter(self, name: str) -> torch.Tensor:
        """Gather a parameter.

        Args:
            name: Its name.

        Returns:
            The full parameter, on all ranks, without a gradient.

        Communication: all_gather, the axes that shard it, its bytes.
        """
        local = self.get_parameter(name).detach()
        layout = self.layouts[name]
        return local if self.mesh is None else relayout(local, layout, replace(layout, dims=()), self.mesh)

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        """Read from a serial module what this class must be built with."""
        raise ConfigError(
            f"{cls.__name__} has no counterpart that it could be made from. Found {type(native).__name__}. Build it, "
            "and load its parameters."
        )

    @abstractmethod
    def _make_native(self, device: torch.device | str | None) -> torch.nn.Module:
        """Make the serial module, with its own initial parameters."""

    def _build(
        self,
        layouts: Mapping[str, Layout],
        device: torch.device | str | None,
        initializers: Mapping[str, Initializer | None] | None = None,
        fans: tuple[int, int] = (1, 1),
    ) -> None:
        """Initialize the full parameters and keep this rank's shard."""
        self.layouts = dict(layouts)
        broadcast_rng_state(self.mesh)
        native = self._make_native(device)
        for name, fill in (initializers or {}).items():
            full = getattr(native, name, None)
            if fill is not None and full is not None:
                initialize(fill, full.data, fans)
        self._take(native)

    def _take(self, native: torch.nn.Module) -> None:
        full_params = {name: getattr(native, name, None) for name in self.layouts}
        for name, full in full_params.items():
            self.register_parameter(name, None)
            if full is not None:
                local = make_param_shard(full, self.layouts[name], self.mesh)
                self.register_parameter(name, local)
        self.layouts = {name: self.layouts[name] for name, full in full_params.items() if full is not None}


def make_param_shard(full: torch.nn.Parameter, layout: Layout, mesh: ParallelMesh | None) -> torch.nn.Parameter:
    """Make this rank's shard of a full parameter, with its placement."""
    rank = 0 if mesh is None else mesh.global_rank
    local = torch.nn.Parameter(_shard_values(full, layout, rank), full.requires_grad)
    if mesh is not None:
        sharding = {axis for axes in layout.dims for axis in axes}
        groups = [(number in sharding, mesh.group(axis)) for number, axis in enumerate(layout.axes)]
        shard_groups = tuple(group for shards, group in groups if shards)
        replica_groups = tuple(group for shards, group in groups if not shards)
        set_placement(local, Placement(layout, rank, shard_groups, replica_groups))
    return local


def _shard_values(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Take the shard of a rank, of a tensor with values or of a lazy one."""
    from colossal._src.lazy import LazyTensor

    return full.shard_values(layout, rank) if isinstance(full, LazyTensor) else shard(full.detach(), layout, rank)


def native_of(native: torch.nn.Module, *kinds: type[torch.nn.Module]) -> Any:
    """Check that a serial module is of one of these kinds, and return it."""
    if not isinstance(native, kinds):
        raise ConfigError(
            f"This layer is made from {' or '.join(kind.__name__ for kind in kinds)}. Found {type(native).__name__}. "
            "Pass such a module."
        )
    return native


def broadcast_rng_state(mesh: ParallelMesh | None) -> None:
    """Let all ranks of the tp axis draw from now on what its first one draws.

    Communication: broadcast, tp, the state of the random numbers: 5 KB, and that of an accelerator's generator.
    """
    if mesh is not None:
        from colossal._src.lazy import GENERATOR_LOCK

        with GENERATOR_LOCK:
            state = torch.get_rng_state()
        Channel("tp", mesh).broadcast([state])
        # Not held during the broadcast: ranks that are threads of one process would wait for each other.
        with GENERATOR_LOCK:
            torch.set_rng_state(state)
        of_device = mesh.accelerator.get_rng_state()
        if of_device is not None:
            Channel("tp", mesh).broadcast([of_device])
            mesh.accelerator.set_rng_state(of_device)
