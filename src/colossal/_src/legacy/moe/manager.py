"""The context of layers of experts of the last versions of the older API."""

from typing import Any, Literal, final

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, ambient_mesh, set_ambient_mesh
from colossal._src.legacy.moe.base_experts import MoeParallelInfo
from colossal._src.legacy.moe.context import MOE_CONTEXT
from colossal._src.nn.moe import num_experts_of_rank
from colossal.errors import ConfigError, MeshError, UnsupportedError

Parallel = Literal["EP", "TP"]


@final
class MoEManager:
    """Arranges the ranks for experts, and collects the losses of their layers, with `MOE_CONTEXT`.

    `MOE_MANAGER` is the one of a program.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import MoEManager
        >>> manager = MoEManager()
        >>> manager.setup(parallel="EP")
        >>> manager.get_parallel(), manager.get_info(4)[0]
        ('EP', 4)
        >>> manager.reset_loss()
        >>> manager.add_loss(torch.tensor(1.5), torch.tensor(0.5))
        >>> [float(each) for losses in manager.get_loss() for each in losses]
        [1.5, 0.5]
        >>> manager.reset_loss()
    """

    def __init__(self) -> None:
        self._parallel: Parallel | None = None
        self._has_setup = False
        self._z_losses: list[torch.Tensor] = []

    @property
    def is_initialized(self) -> bool:
        """Whether `setup` has been called."""
        return self._has_setup

    def setup(
        self,
        parallel: Parallel | None = None,
        mode: Literal["dynamic", "fixed"] = "dynamic",
        max_ep_size: int = 8,
        fixed_dp_size: int = 0,
        fixed_ep_size: int = 0,
        fixed_pp_size: int = 0,
        use_ep_inside: bool = True,
    ) -> None:
        """Say over how many ranks the experts of layers built from now on are sharded.

        Without a mesh in force one is made for the rest of the program. One that is in force, by a config or by
        `with plugin.mesh:`, has to have these sizes.

        Args:
            parallel: ``"EP"`` to shard the experts of a layer, ``"TP"`` the features of each; None for one process.
            mode: ``"dynamic"``: over as many ranks as there are up to `max_ep_size`; ``"fixed"``: over `fixed_ep_size`.
            max_ep_size: The most ranks over which experts are sharded.
            fixed_dp_size: Ranks that have the same experts.
            fixed_ep_size: Ranks that have different ones.
            fixed_pp_size: Stages of the pipeline.
            use_ep_inside: Only True: the ranks over which experts are sharded have consecutive numbers.

        Raises:
            ConfigError: A value is unknown, or a size is missing.
            MeshError: The sizes do not fit the number of ranks, or the mesh in force.
            UnsupportedError: `use_ep_inside` is False.

        Communication: groups are formed; all ranks call.
        """
        if parallel not in (None, "EP", "TP") or mode not in ("dynamic", "fixed"):
            raise ConfigError(
                "parallel is 'EP', 'TP' or None, and mode 'dynamic' or 'fixed'. Found "
                f"parallel={parallel!r}, mode={mode!r}. Pass one of these."
            )
        if not use_ep_inside:
            raise UnsupportedError(
                "Experts are sharded over consecutive ranks, so that their tokens stay within a host if they can. "
                "Found use_ep_inside=False. Leave it out."
            )
        fixed = {"dp": fixed_dp_size, "ep": fixed_ep_size, "pp": fixed_pp_size}
        if mode == "fixed" and min(fixed.values()) < 1:
            raise ConfigError(f"Fixed sizes are all at least 1. Found {fixed}. Pass all three.")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if mode == "dynamic":
            fixed = {"ep": _largest_divisor(world_size, max_ep_size), "pp": 1}
        self._parallel, self._has_setup = parallel, True
        if parallel is not None and world_size > 1:
            _enter_mesh(fixed, mode)

    def get_parallel(self) -> Parallel | None:
        """Say how experts are sharded.

        Returns:
            What `setup` was given.
        """
        return self._parallel

    def get_info(self, num_experts: int, use_tp: bool = False) -> tuple[int, MoeParallelInfo]:
        """Divide experts by ranks.

        Args:
            num_experts: The number of experts of a layer.
            use_tp: Whether ranks share the features of experts: then each has all.

        Returns:
            How many of them this rank has, and over which ranks they are.

        Raises:
            PlanError: They do not divide.
        """
        mesh = ambient_mesh()
        num_local = num_experts if mesh is None or use_tp else num_experts_of_rank(num_experts, mesh)
        return num_local, MoeParallelInfo.of(mesh)

    def reset_loss(self) -> None:
        """Forget the losses of earlier passes."""
        MOE_CONTEXT.reset_loss()
        self._z_losses.clear()

    def add_loss(self, aux_loss: torch.Tensor | float = 0.0, z_loss: torch.Tensor | float = 0.0) -> None:
        """Add the losses of a layer; not while activation checkpointing computes the layer again.

        Args:
            aux_loss: That which balances experts.
            z_loss: That which keeps scores small.
        """
        if isinstance(aux_loss, torch.Tensor):
            MOE_CONTEXT.add_loss(aux_loss)
        if isinstance(z_loss, torch.Tensor):
            self._z_losses.append(z_loss)

    def get_loss(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the losses since the last reset.

        Returns:
            Those that balance experts, and those that keep scores small, of each layer.
        """
        return MOE_CONTEXT.losses, list(self._z_losses)


MOE_MANAGER = MoEManager()
"""The manager of this program."""


def _enter_mesh(sizes: dict[str, int], mode: str) -> None:
    ambient: Any = ambient_mesh()
    if ambient is None:
        options: dict[str, Any] = {"ep": sizes["ep"], "pp": sizes["pp"]}
        if mode == "fixed":
            options["dp"] = sizes["dp"] * sizes["ep"]
        set_ambient_mesh(ParallelMesh(**options, dp_outside=True))
        return
    names = {"dp": "edp"}
    found = {axis: ambient.size(names.get(axis, axis)) for axis in sizes}
    too_many = mode == "dynamic" and found["ep"] > sizes["ep"]
    if too_many or (mode == "fixed" and found != sizes):
        raise MeshError(
            f"Experts are sharded as the mesh in force says. Found {ambient}, and sizes of {sizes} for MOE_MANAGER. "
            "Pass the same to both: parallel=dict(moe=dict(size=...)) in the config, or ParallelMesh(ep=...)."
        )


def _largest_divisor(number: int, most: int) -> int:
    return max((each for each in range(1, min(number, most) + 1) if number % each == 0), default=1)
