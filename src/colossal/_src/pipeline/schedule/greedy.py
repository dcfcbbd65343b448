"""Schedules that a simulation makes: each rank does what is most urgent among what it can do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from colossal._src.pipeline.schedule.action import Action, ActionKind, Costs, PipelineOrder
from colossal._src.pipeline.schedule.stage_placement import StagePlacement

Urgency = Callable[[Action], tuple[int, ...]]


def zero_bubble_v(placement: StagePlacement, num_microbatches: int, costs: Costs | None = None) -> PipelineOrder:
    """Fill the bubble with weight gradients, for which no other rank waits.

    Backward passes are in two parts. Each rank goes backward to inputs as soon as it can, else forward, else it makes
    up for gradients of weights; it has at most as many micro-batches in flight as there are ranks, as with 1F1B (Qi
    et al., "Pipeline Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362).

    Args:
        placement: Which rank has which stage, in a V.
        num_microbatches: Micro-batches of a step.
        costs: How long passes take; all the same by default.

    Returns:
        What each rank does.

    Example:
        >>> from colossal.pipeline import StagePlacement, bubble_fraction, simulate, zero_bubble_v
        >>> placement = StagePlacement(4, num_chunks=2, is_v=True)
        >>> bubble_fraction(simulate(zero_bubble_v(placement, 16), placement)) < 0.06
        True
    """
    passes: tuple[ActionKind, ...] = ("F", "I", "W")

    def urgency(action: Action) -> tuple[int, ...]:
        return ("IFW".index(action.kind), -action.stage, action.microbatch)

    return _GreedySimulation(placement, num_microbatches, passes, urgency, costs or Costs()).run()


def forward_only(placement: StagePlacement, num_microbatches: int) -> PipelineOrder:
    """Let all micro-batches pass without going back, to evaluate.

    Args:
        placement: Which rank has which stage.
        num_microbatches: Micro-batches of a step.

    Returns:
        What each rank does.

    Example:
        >>> from colossal.pipeline import StagePlacement, forward_only
        >>> forward_only(StagePlacement(2, num_chunks=2, is_v=True), 3)[0]
        (F0.0, F0.1, F0.2, F3.0, F3.1, F3.2)
    """

    def urgency(action: Action) -> tuple[int, ...]:
        return (-action.stage, action.microbatch)

    return _GreedySimulation(placement, num_microbatches, ("F",), urgency, Costs()).run()


@final
@dataclass
class _GreedySimulation:
    """Ranks that work, in simulated time; passes of one kind through one stage take micro-batches in their order."""

    placement: StagePlacement
    num_microbatches: int
    kinds: tuple[ActionKind, ...]
    urgency: Urgency
    costs: Costs
    ends: dict[Action, float] = field(default_factory=dict)

    def run(self) -> PipelineOrder:
        ranks = range(self.placement.num_ranks)
        heads = [
            {Action(kind, stage, 0) for kind in self.kinds for stage in self.placement.stages_of(rank)}
            for rank in ranks
        ]
        orders: list[list[Action]] = [[] for _ in ranks]
        free = [0.0 for _ in ranks]
        while any(heads):
            # Ties go to the lower rank: every rank simulates by itself, and all must find the same order.
            begin, rank, _, action = min(
                (max(ready, free[rank]), rank, self.urgency(action), action)
                for rank in ranks
                for action in heads[rank]
                if (ready := self._ready_at(action, rank)) is not None
            )
            orders[rank].append(action)
            self.ends[action] = free[rank] = begin + self.costs.of(action.kind)
            heads[rank].remove(action)
            if action.microbatch + 1 < self.num_microbatches:
                heads[rank].add(action._replace(microbatch=action.microbatch + 1))
        return tuple(map(tuple, orders))

    def _ready_at(self, action: Action, rank: int) -> float | None:
        """When a pass can begin; None if that is not known yet, or there is no room for another micro-batch."""
        needed = action.needs(self.placement.num_stages)
        if not self._has_room(action, rank) or (needed is not None and needed not in self.ends):
            return None
        if needed is None:
            return 0.0
        return self.ends[needed] + (self.costs.transfer if self.placement.rank_of(needed.stage) != rank else 0.0)

    def _has_room(self, action: Action, rank: int) -> bool:
        """Whether a rank may begin with one more micro-batch: as many as there are ranks may be in flight."""
        first, size = self.placement.stages_of(rank)[0], self.placement.num_ranks
        if "W" not in self.kinds or action[:2] != ("F", first) or action.microbatch < size:
            return True
        # Activations are kept until the gradients of weights are computed, so only W makes room.
        return Action("W", first, action.microbatch - size) in self.ends
