"""Gather all tokens on all ranks of experts, and add up over ranks what the experts of each make of them.

It sends each token once to each rank, instead of once to each of its experts: fewer bytes where a token goes to more
experts than there are ranks. Shapes are as of `dispatch`, and R is the number of ranks of the ep axis.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from dataclasses import dataclass
from typing import final

import torch

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal._src.nn.moe.dispatch import EXPERTS, num_experts_of_rank


@final
@dataclass(frozen=True)
class GatheredTokens:
    """The rows for the experts of this rank, of the tokens of all ranks, and what it takes to add up their results."""

    rows: torch.Tensor  # (N, D), in the order of the experts
    weights: torch.Tensor  # of each row, (N,)
    ends: torch.Tensor  # where the rows of each expert end, in host memory
    token_of_row: torch.Tensor  # among the padded tokens of all ranks, (N,)
    num_padded: int  # tokens of each rank, with padding
    num_tokens: int  # of this rank, T
    mesh: ParallelMesh


def gather_tokens(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, num_experts: int, mesh: ParallelMesh
) -> GatheredTokens:
    """Gather tokens, their experts and weights, and pick what is for the experts of this rank.

    Communication: all_gather, ep, 8 R bytes, and with T the largest of all ranks, R T D elements and the experts and
    weights of these tokens; backward reduce_scatter, ep, the same elements.
    """
    channel = Channel(EXPERTS, mesh)
    num_local, most = num_experts_of_rank(num_experts, mesh), max(channel.lengths(len(tokens)))
    padding = most - len(tokens)
    full = comm.gather(_pad(tokens, padding, 0), EXPERTS, 0, mesh, partial_grad=True)
    all_weights = comm.gather(_pad(weights, padding, 0), EXPERTS, 0, mesh, partial_grad=True)
    experts = channel.all_gather(_pad(chosen, padding, num_experts), 0) - channel.rank * num_local
    is_here = (experts >= 0) & (experts < num_local)
    keys, order = torch.where(is_here, experts, num_local).flatten().sort(stable=True)  # others come last
    if keys.is_meta:  # all experts are assumed to get as many
        ends = torch.arange(1, num_local + 1, device="cpu") * len(keys) // num_experts
    else:
        ends = torch.searchsorted(keys, torch.arange(num_local, device=keys.device), right=True).cpu()
    index = order[: int(ends[-1])]
    token_of_row = index // chosen.shape[1]
    picked = all_weights.flatten().index_select(0, index)
    return GatheredTokens(full.index_select(0, token_of_row), picked, ends, token_of_row, most, len(tokens), mesh)


def add_results(outputs: torch.Tensor, gathered: GatheredTokens) -> torch.Tensor:
    """Add up the weighted results of the experts of all ranks, for the tokens of this rank: (N, D) to (T, D).

    Communication: reduce_scatter, ep, R T D elements in the longer dtype of outputs and weights; backward all_gather,
    ep, the same.
    """
    dtype = torch.promote_types(outputs.dtype, gathered.weights.dtype)
    weighted = outputs.to(dtype) * gathered.weights.to(dtype).unsqueeze(1)
    length = gathered.num_padded * gathered.mesh.size(EXPERTS)
    partial = weighted.new_zeros(length, outputs.shape[1]).index_add(0, gathered.token_of_row, weighted)
    return comm.reduce_scatter(partial, EXPERTS, 0, gathered.mesh)[: gathered.num_tokens].to(outputs.dtype)


def _pad(rows: torch.Tensor, number: int, value: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_full((number, *rows.shape[1:]), value)]) if number else rows
