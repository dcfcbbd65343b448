"""Groups that a program forms for a parallel mode of its own."""

from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import distributed as dist

from colossal._src.cluster import OWN_MODES, Config, current_mesh, form_own_modes_by
from colossal._src.legacy.context.parallel_context import global_context
from colossal._src.legacy.context.parallel_mode import ParallelMode
from colossal._src.legacy.registry import DIST_GROUP_INITIALIZER
from colossal.errors import ConfigError

INITIALIZER_MAPPING = OWN_MODES
"""A mode of tensor parallelism of the program's own, and the registered class that forms its groups."""

Group = tuple[int, int, dist.ProcessGroup | None, dist.ProcessGroup | None, Iterable[int], ParallelMode]
"""The place of this process, the size of the group, the group, that for host tensors, the ranks, the mode."""


class ProcessGroupInitializer:
    """Forms the groups of a parallel mode; a program derives from it and registers the class.

    Args:
        rank: The number of this process.
        world_size: The number of processes.
        config: The config of the program.
        data_parallel_size: The number of replicas; that of the mesh by default, as for the next two.
        pipeline_parallel_size: The number of pipeline stages.
        tensor_parallel_size: The number of ranks of the mode.

    Example:
        >>> from colossal.legacy.context import INITIALIZER_MAPPING, ParallelMode, ProcessGroupInitializer
        >>> from colossal.legacy.registry import DIST_GROUP_INITIALIZER
        >>> @DIST_GROUP_INITIALIZER.register_module
        ... class PairInitializer(ProcessGroupInitializer):
        ...     def init_dist_group(self):
        ...         ranks = [self.rank // 2 * 2, self.rank // 2 * 2 + 1]
        ...         return self.rank % 2, 2, None, None, ranks, ParallelMode.PAIRS
        >>> ParallelMode.PAIRS = "pairs"
        >>> INITIALIZER_MAPPING["pairs"] = "PairInitializer"  # parallel=dict(tensor=dict(size=2, mode="pairs"))
        >>> INITIALIZER_MAPPING.pop("pairs")
        'PairInitializer'
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Config,
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        tensor_parallel_size: int | None = None,
    ) -> None:
        mesh = current_mesh()
        self.rank, self.world_size, self.config = rank, world_size, config
        self.data_parallel_size = data_parallel_size or mesh.size("dp")
        self.pipeline_parallel_size = pipeline_parallel_size or mesh.size("pp")
        self.tensor_parallel_size = tensor_parallel_size or mesh.size("tp")

    def init_dist_group(self) -> Group | list[Group] | None:
        """Form the groups.

        Returns:
            One group or a list of them: this process's place, the size, the process group, the one for host tensors,
            the global ranks, and the mode. None if the mode of the mesh is enough.

        Communication: groups are formed; all ranks call.
        """
        return self.init_parallel_groups()

    def init_parallel_groups(self) -> Group | list[Group] | None:
        """Form the groups, under the other documented name of `init_dist_group`.

        Returns:
            As `init_dist_group`.

        Raises:
            ConfigError: The class has neither.
        """
        raise ConfigError(
            f"An initializer has init_dist_group or init_parallel_groups. Found neither in {type(self).__name__}. "
            "Write one that returns the groups."
        )


def _form(config: Config, seed: int | None) -> None:
    """Let the registered class of the config's mode form its groups."""
    tensor = cast("dict[str, Any]", config["parallel"]["tensor"])
    name = INITIALIZER_MAPPING[tensor["mode"]]
    make = cast("Callable[..., ProcessGroupInitializer]", DIST_GROUP_INITIALIZER.get_module(name))
    mesh = current_mesh()
    sizes = (mesh.size("dp"), mesh.size("pp"), mesh.size("tp"))
    own = {key: value for key, value in tensor.items() if key not in {"size", "mode"}}
    formed = make(mesh.global_rank, mesh.world_size, config, *sizes, **own).init_dist_group()
    for each in [formed] if isinstance(formed, tuple) else formed or []:
        global_context.add_group(*each)
    if seed is not None:
        global_context.set_seed(seed)


form_own_modes_by(_form)
