"""The base class of experts that a program writes itself."""

from dataclasses import dataclass
from typing import Literal, final

from torch import distributed as dist
from torch import nn

from colossal._src.cluster import ParallelMesh, ambient_mesh
from colossal._src.legacy.notice import superseded
from colossal._src.nn.moe import num_experts_of_rank
from colossal.errors import ConfigError, UnsupportedError

_SUCCESSOR = "colossal.nn.moe.MixtureOfExperts(router, experts)"


@final
@dataclass(frozen=True)
class MoeParallelInfo:
    """Over which ranks the experts of a layer are.

    Args:
        ep_inside: Whether the ranks that have different experts have consecutive numbers: always.
        ep_size: Ranks that have different experts.
        dp_size: Ranks that have the same ones.
        pp_size: Stages of the pipeline.

    Example:
        >>> from colossal.legacy.moe import MoeParallelInfo
        >>> MoeParallelInfo(ep_size=2, dp_size=1).ep_size
        2
    """

    ep_inside: bool = True
    ep_size: int = 1
    dp_size: int = 1
    pp_size: int = 1

    @classmethod
    def of(cls, mesh: ParallelMesh | None) -> "MoeParallelInfo":
        """Look at a mesh.

        Args:
            mesh: The mesh; None for one process.

        Returns:
            What it says of experts.
        """
        if mesh is None:
            return cls()
        return cls(True, mesh.size("ep"), mesh.size("edp"), mesh.size("pp"))

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The ranks that have different experts, on the ambient mesh."""
        return _ambient().group("ep")

    @property
    def ep_rank(self) -> int:
        """The index of this rank among these."""
        return _ambient().rank("ep")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that have the same experts, on the ambient mesh."""
        return _ambient().group("edp")

    @property
    def dp_rank(self) -> int:
        """The index of this rank among these."""
        return _ambient().rank("edp")


class BaseExperts(nn.Module):
    """The base class of experts that a program writes itself, all of a rank in one module.

    Its forward method takes tokens of shape (G, E, C, D), in groups G, for each of the E experts of this rank, and
    returns the same shape. Rows of zeros may be among them, whose results nobody uses. Each of its parameters has a row
    for each of the E experts. The rank that builds it draws their values: draw those of all experts alike on all
    ranks and keep the own ones for a model that starts as one process would, or write `Experts`, which does that.

    Args:
        comm_name: Only ``"all_to_all"``; `TPExperts` are what ``"all_gather"`` is for.
        num_experts: The number of experts on all ranks.

    Attributes:
        num_total_experts: The number of experts on all ranks.
        num_local_experts: That of this rank, E.
        dist_info: Over which ranks they are.

    Raises:
        ConfigError: The name is unknown.
        PlanError: The ranks over which experts are sharded do not divide their number.
        UnsupportedError: The name is ``"all_gather"``.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import BaseExperts, MoeLayer, Top1Router
        >>> class Scales(BaseExperts):
        ...     def __init__(self, num_experts, width):
        ...         super().__init__("all_to_all", num_experts)
        ...         self.scale = torch.nn.Parameter(torch.ones(self.num_local_experts, 1, width))
        ...
        ...     def forward(self, inputs):
        ...         return inputs * self.scale
        >>> MoeLayer(8, 4, Top1Router(), Scales(4, 8)).eval()(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, comm_name: Literal["all_to_all", "all_gather"], num_experts: int) -> None:
        super().__init__()
        if comm_name not in ("all_to_all", "all_gather"):
            raise ConfigError(f"Tokens go to experts by 'all_to_all'. Found {comm_name!r}. Pass that.")
        if comm_name == "all_gather":
            raise UnsupportedError(
                "Experts of a program's own get their tokens by 'all_to_all'. Found 'all_gather', by which all ranks "
                "compute some features of all tokens. Derive from BaseExperts('all_to_all', ...), or use TPExperts."
            )
        superseded("colossal.nn.layer.moe", _SUCCESSOR)
        mesh = ambient_mesh()
        self.comm_name, self.num_total_experts = comm_name, num_experts
        self.num_local_experts = num_experts if mesh is None else num_experts_of_rank(num_experts, mesh)
        self.dist_info = MoeParallelInfo.of(mesh)


def _ambient() -> ParallelMesh:
    mesh = ambient_mesh()
    if mesh is None:
        raise ConfigError(
            "Groups of experts are those of the ambient mesh. Found none. Launch with parallel=dict(moe=dict(size=...))"
            ", or enter ParallelMesh(ep=...)."
        )
    return mesh
