"""The mesh and the config of the program, as programs of the older API ask for them."""

import os
import random
from typing import Any

import numpy as np
from torch import distributed as dist

from colossal._src.cluster import (
    Config,
    DistCoordinator,
    ParallelMesh,
    current_config,
    current_mesh,
    form_own_mode,
    launch,
    mesh_options,
    read_config,
    set_ambient_mesh,
    set_current_config,
)
from colossal._src.comm import gather_objects
from colossal._src.legacy.context import seeds
from colossal._src.legacy.context.mesh_groups import MeshGroups
from colossal._src.legacy.context.parallel_mode import ParallelMode


class ParallelContext(MeshGroups):
    """The ambient mesh and the config; `global_context` is the only one.

    Ranks count along tensor parallelism first, then along the pipeline, then along the replicas, as `launch` with a
    config arranges them.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.context import ParallelContext, ParallelMode, global_context
        >>> from colossal.testing import fake_world
        >>> with fake_world(8, rank=5), ParallelMesh(pp=2, tp=2, dp_outside=True):
        ...     print(global_context.get_ranks_in_group(ParallelMode.DATA))
        ...     print(global_context.get_local_rank(ParallelMode.TENSOR), isinstance(global_context, ParallelContext))
        [1, 5]
        1 True

    Attributes:
        verbose: Whether `init_global_dist` logs the process group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.verbose = False

    # ------------------------------------------------------------------ the config

    @property
    def config(self) -> Config:
        """The config of the program; an empty one if it was launched without."""
        config = current_config()
        if config is None:
            set_current_config(config := Config())
        return config

    def load_config(self, config: Any) -> None:
        """Make a config that of the program.

        Args:
            config: The path of a Python file, or a dict.

        Raises:
            ConfigError: It is neither, or the file is missing or not of Python.
        """
        set_current_config(read_config(config))

    # ------------------------------------------------------------------ the pipeline

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process has the first stage, and the first of its model chunks is in use.

        Args:
            ignore_virtual: Whether to leave aside which of several model chunks is in use.

        Returns:
            True if it has.
        """
        if not ignore_virtual and self.virtual_pipeline_parallel_size and self.virtual_pipeline_parallel_rank != 0:
            return False
        return current_mesh().rank("pp") == 0

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process has the last stage, and the last of its model chunks is in use.

        Args:
            ignore_virtual: Whether to leave aside which of several model chunks is in use.

        Returns:
            True if it has.
        """
        size = self.virtual_pipeline_parallel_size
        if not ignore_virtual and size and self.virtual_pipeline_parallel_rank != size - 1:
            return False
        return current_mesh().rank("pp") == current_mesh().size("pp") - 1

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return current_mesh().world_size

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas."""
        return current_mesh().size("dp")

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of pipeline stages."""
        return current_mesh().size("pp")

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks over which a layer is sharded; in the mode ``sequence``, those of a sequence."""
        return current_mesh().size("tp") * current_mesh().size("sp")

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks over which a sequence is sharded."""
        return current_mesh().size("sp")

    @property
    def virtual_pipeline_parallel_size(self) -> int | None:
        """The number of model chunks on each stage; None without several."""
        return self._state.virtual_size

    @property
    def virtual_pipeline_parallel_rank(self) -> int | None:
        """The chunk in use."""
        return self._state.virtual_rank

    def set_virtual_pipeline_parallel_size(self, size: int | None) -> None:
        """Set the number of model chunks on each stage.

        Args:
            size: The number; None without several.
        """
        self._state.virtual_size = size

    def set_virtual_pipeline_parallel_rank(self, rank: int | None) -> None:
        """Set the chunk in use.

        Args:
            rank: Its number, from 0; None without several.
        """
        self._state.virtual_rank = rank

    # ------------------------------------------------------------------ the processes

    def init_global_dist(self, rank: int, world_size: int, backend: str, host: str, port: int) -> None:
        """Join the process group, as `launch` does, without a config.

        Args:
            rank: This process's number.
            world_size: Number of processes.
            backend: Communication backend.
            host: Name or address of the host of rank 0.
            port: A free port on that host.

        Communication: as in `launch`.
        """
        config = current_config()
        launch(rank, world_size, host, port, backend, verbose=self.verbose)
        set_current_config(config)

    def init_parallel_groups(self) -> None:
        """Arrange the processes as the config says, and form the groups of a mode of the program's own.

        Raises:
            ConfigError: The entry ``parallel`` is wrong.
            MeshError: The sizes do not multiply to the number of processes.

        Communication: groups are formed; all ranks call.
        """
        set_ambient_mesh(ParallelMesh(**mesh_options(self.config, dist.get_world_size())))
        form_own_mode(self.config)

    def detect_num_processes_on_current_node(self) -> int:
        """Count the processes on this host.

        Returns:
            Their number.

        Communication: the names of the hosts are gathered; all ranks call.
        """
        name = os.uname().nodename
        return gather_objects(name, [self.get_group(ParallelMode.GLOBAL)]).count(name)

    def set_seed(self, seed: int) -> None:
        """Seed the random generators, the same on all ranks, and those of `context.random` for each mode.

        Args:
            seed: The seed of everything that is the same on all replicas. The mode TENSOR has another one on each
                tensor-parallel rank.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (user code draws from the legacy generator)
        current_mesh().accelerator.manual_seed(seed)
        seeds.set_seeds(seed)

    def destroy(self) -> None:
        """Leave the process group.

        Communication: as in `DistCoordinator.destroy`.
        """
        DistCoordinator().destroy()


global_context = ParallelContext()
"""The mesh and the config of the program."""
