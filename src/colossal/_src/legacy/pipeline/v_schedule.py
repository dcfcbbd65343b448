"""The order of passes of a zero-bubble pipeline, as a list of nodes for each rank."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, final

from colossal._src.legacy.notice import superseded
from colossal._src.pipeline import (
    ActionKind,
    Costs,
    PipelineOrder,
    StagePlacement,
    check_schedule,
    simulate,
    zero_bubble_v,
)
from colossal.errors import ConfigError

_CHUNKS = 2


@final
@dataclass(eq=True, frozen=True)
class ScheduledNode:
    """One thing that a rank does.

    Args:
        type: ``"F"``, ``"B"`` for the gradient of the input, ``"W"`` for those of weights; what other types name, such
            as ``"SEND_FORWARD"``, happens by itself.
        chunk: The chunk of the rank.
        stage: The index of the rank.
        minibatch: The micro-batch.
        start_time: When it begins, in the unit of the costs.
        completion_time: When it ends.
        rollback: Accepted for programs that pass it.

    Example:
        >>> from colossal.legacy.pipeline import ScheduledNode
        >>> ScheduledNode("F", chunk=0, stage=1, minibatch=2).minibatch
        2
    """

    type: str
    chunk: int
    stage: int
    minibatch: int
    start_time: float = 0
    completion_time: float = 0
    rollback: bool = False


@final
class PipelineGraph:
    """Computes the schedule of a zero-bubble pipeline in a V, and when each pass begins and ends.

    Superseded by `colossal.pipeline.zero_bubble_v`. Of that function's orders for these costs and for equal ones, it is
    the one that ends first, among those in which ranks never wait for each other.

    Args:
        n_stage: Ranks.
        n_micro: Micro-batches.
        f_cost: How long a forward pass of one chunk takes, in any unit.
        b_cost: How long the gradient of its input takes.
        w_cost: How long the gradients of its weights take.
        c_cost: How long a message takes.
        f_mem: What a forward pass adds to the memory, in any unit.
        b_mem: What the gradient of the input adds; negative.
        w_mem: What the gradients of weights add; negative.
        max_mem: How much a rank has; enough for as many micro-batches as there are ranks by default.

    Raises:
        ConfigError: A cost is negative, or the three changes of the memory do not cancel.

    Example:
        >>> from colossal.legacy.pipeline import PipelineGraph
        >>> graph = PipelineGraph(2, 4, f_cost=1, b_cost=1, w_cost=1, c_cost=0, f_mem=2, b_mem=-1, w_mem=-1)
        >>> [(node.type, node.chunk, node.minibatch) for node in graph.get_v_schedule()[1]][:3]
        [('F', 0, 0), ('F', 1, 0), ('F', 0, 1)]
    """

    def __init__(
        self,
        n_stage: int,
        n_micro: int,
        f_cost: float,
        b_cost: float,
        w_cost: float,
        c_cost: float,
        f_mem: float,
        b_mem: float,
        w_mem: float,
        max_mem: float | None = None,
    ) -> None:
        superseded("PipelineGraph", "zero_bubble_v(StagePlacement(size, 2, is_v=True), num_microbatches)")
        if min(f_cost, b_cost, w_cost, c_cost) < 0 or abs(f_mem + b_mem + w_mem) > 1e-6 * abs(f_mem):
            raise ConfigError(
                "Costs are at least 0, and backward passes free what the forward pass has taken. Found costs "
                f"{(f_cost, b_cost, w_cost, c_cost)} and changes of the memory {(f_mem, b_mem, w_mem)}. Make f_mem + "
                "b_mem + w_mem zero."
            )
        self.n_stage, self.n_micro, self.max_mem = n_stage, n_micro, max_mem
        self._costs = Costs(forward=f_cost, inputs=b_cost, weights=w_cost, transfer=c_cost)
        self._memory: dict[ActionKind, float] = {"F": f_mem, "I": b_mem, "W": w_mem}
        self._placement = StagePlacement(n_stage, _CHUNKS, is_v=True)

    def get_v_schedule(self, only_run_time: bool = False) -> "list[list[ScheduledNode]] | float":
        """Compute the schedule.

        Args:
            only_run_time: Return when it ends only.

        Returns:
            The nodes of each rank, in their order; or the time.

        Raises:
            ConfigError: A rank needs more than `max_mem`.
        """
        # The order for equal costs ends on every backend; the one for slow messages often not.
        assumed = (Costs(), replace(self._costs, transfer=0.0), self._costs)
        candidates = (zero_bubble_v(self._placement, self.n_micro, costs) for costs in assumed)
        orders = min((each for each in candidates if self._ends(each)), key=self._duration)
        self._check_memory(orders)
        if only_run_time:
            return self._duration(orders)
        passes = {each.action: each for each in simulate(orders, self._placement, self._costs)}
        return [
            [
                ScheduledNode(
                    _type_of(action.kind),
                    self._placement.stages_of(rank).index(action.stage),
                    rank,
                    action.microbatch,
                    passes[action].begin,
                    passes[action].end,
                )
                for action in order
            ]
            for rank, order in enumerate(orders)
        ]

    def _ends(self, orders: PipelineOrder) -> bool:
        """Whether ranks never wait for each other."""
        try:
            check_schedule(orders, self._placement)
        except ConfigError:
            return False
        return True

    def _duration(self, orders: PipelineOrder) -> float:
        return max(each.end for each in simulate(orders, self._placement, self._costs))

    def _check_memory(self, orders: PipelineOrder) -> None:
        peak = max(max(accumulate(self._memory[action.kind] for action in order)) for order in orders)
        if self.max_mem is not None and peak > self.max_mem:
            raise ConfigError(
                f"A rank has max_mem={self.max_mem:g} of memory. Found that this schedule takes {peak:g}, for as many "
                f"micro-batches as there are ranks. Pass max_mem={peak:g}, or none; use smaller micro-batches, or "
                "pp_style='1f1b'."
            )


def _type_of(kind: ActionKind) -> Literal["F", "B", "W"]:
    return "F" if kind == "F" else "W" if kind == "W" else "B"
