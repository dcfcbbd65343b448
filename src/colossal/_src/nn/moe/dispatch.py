"""Send tokens to the experts that a router chose, wherever these are, and add up what comes back.

In shapes, T is the number of tokens of this rank, D their width, K the number of experts that a token goes to, and N
the number of rows that the experts of this rank get from all ranks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import distributed as dist

from colossal._src import comm
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import Channel, RowExchange
from colossal._src.nn.moe.row_order import RowOrder
from colossal.errors import PlanError

EXPERTS: Axis = "ep"
"""The axis along which ranks have different experts."""


@final
@dataclass(frozen=True)
class Dispatched:
    """Tokens that have arrived at their experts, and what it takes to bring the results back.

    Args:
        rows: Of shape (N, D): first those of this rank's first expert, then those of its second, and so on.
        expert_of_row: For each row, the index of its expert among those of this rank; of shape (N,).
        counts: How many rows each expert of this rank has; they add up to N.
        sent: The order in which the tokens of this rank, K times each, went out.
        arrived: The order by experts of what came in; None if nothing was exchanged.
        send: How many rows went to each rank of the ep axis.
        receive: How many came from each.
        mesh: The mesh.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.moe import Dispatched, dispatch
        >>> from colossal.testing import fake_world
        >>> with fake_world(1):
        ...     arrived: Dispatched = dispatch(torch.eye(2), torch.tensor([[2, 0], [2, 1]]), 3, ParallelMesh())
        >>> arrived.counts, arrived.expert_of_row.tolist(), arrived.rows.tolist()
        ((1, 1, 2), [0, 1, 2, 2], [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    """

    rows: torch.Tensor
    expert_of_row: torch.Tensor
    counts: tuple[int, ...]
    sent: RowOrder
    arrived: RowOrder | None
    send: tuple[int, ...]
    receive: tuple[int, ...]
    mesh: ParallelMesh


def dispatch(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    num_experts: int,
    mesh: ParallelMesh,
    meanwhile: Callable[[], object] | None = None,
) -> Dispatched:
    """Send each token to the ranks of its experts.

    No token is dropped, whatever number of them an expert gets: messages are as long as they have to be. The rank with
    index r on the ep axis has the experts from r * num_experts / ep.

    Args:
        tokens: Of shape (T, D); T may differ between ranks.
        chosen: The experts of each token, of shape (T, K): integers from 0.
        num_experts: The number of experts on all ranks; the size of the ep axis divides it.
        mesh: The mesh.
        meanwhile: Called while the tokens are on their way; backward, what it computed is as well, while their
            gradients are. Where collectives have streams of their own (NCCL), or a core to spare, that takes no time.

    Returns:
        What has arrived here.

    Raises:
        PlanError: The experts do not divide by the ranks, or a token is for an expert that there is not.

    Communication: all_to_all, ep, num_experts x 8 bytes, and the rows that leave this rank: about T K D (ep - 1) / ep
    elements; backward the latter.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.moe import combine, dispatch
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(ep=2) as mesh:  # rank 0 has experts 0 and 1
        ...         tokens, chosen = torch.ones(2, 4), torch.tensor([[0, 3], [1, 3]])
        ...         arrived = dispatch(tokens, chosen, 4, mesh)
        ...         combined = combine(2 * arrived.rows, torch.full((2, 2), 0.5), arrived)
        ...         return arrived.counts, bool((combined == 2).all())
        >>> run_threads(program, 2)
        [((2, 2), True), ((0, 4), True)]
    """
    channel = Channel(EXPERTS, mesh)
    size, num_local = channel.size, num_experts_of_rank(num_experts, mesh)
    keys, sent = RowOrder.by(chosen.flatten(), chosen.shape[1])
    own = _count_rows(keys, num_experts).view(size, num_local)
    theirs = channel.all_to_all(own.to(keys.device), 0, 0)
    if keys.is_meta or (size > 1 and dist.get_backend(channel.group) == "fake"):
        theirs = own[channel.rank].expand(size, -1)  # nothing was sent: all ranks are assumed to send alike
    numbers: list[int] = torch.cat([own.sum(1), theirs.flatten()]).tolist()  # the one time that the host waits
    send, flat = tuple(numbers[:size]), numbers[size:]
    if sum(send) != chosen.numel():
        raise PlanError(
            f"A token is for one of the {num_experts} experts, which are numbered from 0. Found numbers from "
            f"{int(keys.min())} to {int(keys.max())}. Pass what the router of these experts chose."
        )
    receive = tuple(sum(flat[rank * num_local : (rank + 1) * num_local]) for rank in range(size))
    rows, arrived = sent.take(tokens), None
    if meanwhile is None:
        rows = comm.exchange_rows(rows, EXPERTS, send, receive, mesh)
    else:
        exchange = RowExchange(EXPERTS, send, receive, mesh)
        ticket = exchange.start(rows)
        meanwhile()
        rows = exchange.wait(ticket)
    if size > 1:
        experts = torch.arange(num_local, device=keys.device).repeat(size)
        keys, arrived = RowOrder.by(experts.repeat_interleave(theirs.flatten().to(keys.device), output_size=len(rows)))
        rows = arrived.take(rows)
    counts = tuple(sum(flat[expert::num_local]) for expert in range(num_local))
    return Dispatched(rows, keys, counts, sent, arrived, send, receive, mesh)


def combine(outputs: torch.Tensor, weights: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
    """Send the results of experts back to the ranks of their tokens, and add up those of each token by its weights.

    Args:
        outputs: What the experts made of `Dispatched.rows`, of shape (N, D).
        weights: The weights of the experts of each token, of shape (T, K).
        dispatched: What `dispatch` has returned.

    Returns:
        The results, of shape (T, D), in the dtype of `outputs`; sums are in that of the weights, if it is longer.

    Communication: all_to_all, ep, the bytes of the rows that go back to other ranks; backward, of the gradients of
    those that came back.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.moe import combine, dispatch
        >>> from colossal.testing import fake_world
        >>> with fake_world(1):
        ...     arrived = dispatch(torch.ones(1, 2), torch.tensor([[1, 0]]), 2, ParallelMesh())
        ...     results = arrived.rows * (1 + arrived.expert_of_row[:, None])  # expert 1 doubles
        ...     print(combine(results, torch.tensor([[0.5, 0.25]]), arrived))
        tensor([[1.2500, 1.2500]])
    """
    rows = outputs if dispatched.arrived is None else dispatched.arrived.restore(outputs)
    rows = comm.exchange_rows(rows, EXPERTS, dispatched.receive, dispatched.send, dispatched.mesh)
    return dispatched.sent.add_weighted(rows, weights)


def _count_rows(keys: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the rows for each expert, in host memory if there are only shapes; then all experts get as many."""
    if keys.is_meta:
        places = torch.arange(num_experts, device="cpu")
        return (len(keys) - places + num_experts - 1) // num_experts
    ends = torch.searchsorted(keys, torch.arange(-1, num_experts, device=keys.device), right=True)
    return ends.diff()


def num_experts_of_rank(num_experts: int, mesh: ParallelMesh) -> int:
    """Divide the experts by the ranks of the ep axis."""
    size = mesh.size(EXPERTS)
    if size > num_experts:
        # Ranks of one expert would divide its tokens or its features: copies on the edp axis, and tp, do just that.
        raise PlanError(
            f"A rank of the ep axis has one or more experts. Found {num_experts} experts and {mesh}. Pass "
            f"ep={num_experts}, so that ranks have copies of an expert, each for the tokens of some ranks; or use "
            "tp_size without ep_size, which shards the features of every expert."
        )
    if num_experts % size:
        fitting = ", ".join(str(each) for each in range(1, num_experts + 1) if num_experts % each == 0)
        raise PlanError(
            f"The size of the ep axis divides the number of experts. Found {num_experts} experts and {mesh}. Pass one "
            f"of {fitting} as ep."
        )
    return num_experts // size
