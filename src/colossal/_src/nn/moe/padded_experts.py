"""Experts that a program computes all at once, from tokens that are padded to as many for each of them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.nn.moe.dispatch import EXPERTS
from colossal._src.nn.moe.expert_parallel import ExpertParallel
from colossal._src.nn.moe.experts import apply_sorted
from colossal._src.nn.moe.grouped_products import counts_of
from colossal._src.tensor import Layout, Placement, set_placement
from colossal.errors import PlanError


class PaddedExperts(nn.Module):
    """Gives a module the tokens of its experts in the shape (1, E, C, D): C for each of E, zeros where there are fewer.

    Args:
        module: Returns the same shape.
        num_experts: How many experts it has on this rank, E.
    """

    num_experts: int

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.module, self.num_experts = module, num_experts

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of what the experts of each token make of it.

        Args:
            hidden_states: Of shape (T, D).
            chosen: The experts of each token, of shape (T, K).
            weights: Their weights, of shape (T, K).

        Returns:
            The results, of shape (T, D).
        """
        return apply_sorted(hidden_states, chosen, weights, self.num_experts, self.forward_grouped)

    def forward_grouped(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute rows that are sorted by expert.

        Args:
            rows: Of shape (N, D): those of the first expert, then those of the second, and so on.
            ends: Where the rows of each expert end, of shape (E,).

        Returns:
            The results, of shape (N, D).
        """
        counts = counts_of(ends)
        # one for each even without tokens, so that all parameters have gradients, of zeros
        capacity = max(*counts, 1)
        numbers = torch.tensor(counts, device=rows.device)
        experts = torch.arange(self.num_experts, device=rows.device).repeat_interleave(numbers, output_size=len(rows))
        places = torch.cat([torch.arange(count, device=rows.device) for count in counts])
        blocks = rows.new_zeros(self.num_experts, capacity, rows.shape[1])
        outputs = self.module(blocks.index_put((experts, places), rows).unsqueeze(0))
        return outputs.squeeze(0)[experts, places]


class ShardedPaddedExperts(ExpertParallel, PaddedExperts):
    """`PaddedExperts` of which each rank has some."""


def pad_experts(module: nn.Module, num_experts: int, mesh: ParallelMesh | None) -> PaddedExperts:
    """Take a module that has the experts of this rank for a layer of experts, and say so of its parameters.

    Args:
        module: Takes and returns tokens of shape (1, E, C, D). Its parameters have a row for each of its E experts.
        num_experts: How many experts there are on all ranks.
        mesh: The mesh; None for one process.

    Returns:
        What `MixtureOfExperts` takes.

    Raises:
        PlanError: A parameter has another number of rows.
    """
    size = 1 if mesh is None else mesh.size(EXPERTS)
    num_local = num_experts // size
    if mesh is None or size == 1:
        return PaddedExperts(module, num_local)
    sharded, layouts = ShardedPaddedExperts(module, num_local), dict[str, Layout]()
    for name, parameter in module.named_parameters():
        if parameter.shape[:1] != (num_local,):
            raise PlanError(
                "Experts that a rank builds for itself have parameters with a row for each of them. Found "
                f"{name} of the shape {tuple(parameter.shape)} in {type(module).__name__}, which has {num_local} of "
                f"{num_experts} experts. Stack what its experts have in one parameter, or build all experts on all "
                "ranks: colossal.nn.moe.StackedExperts."
            )
        shape = (num_experts, *parameter.shape[1:])
        dims = "S0" + "R" * (parameter.dim() - 1)
        layout = Layout.parse(dims, shape, mesh=mesh, axes=[EXPERTS])
        set_placement(parameter, Placement(layout, mesh.global_rank, (mesh.group(EXPERTS),)))
        layouts[f"module.{name}"] = layout
    sharded.layouts, sharded.mesh, sharded.exchange = layouts, mesh, "all_to_all"
    return sharded
