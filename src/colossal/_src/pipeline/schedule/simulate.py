"""What a schedule would take, and whether it comes to an end."""

from dataclasses import dataclass
from typing import final

from colossal._src.pipeline.schedule.action import ORDER_ADVICE, Action, Costs, PipelineOrder
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
from colossal.errors import ConfigError


@final
@dataclass(frozen=True)
class Pass:
    """A pass, and when it was.

    Args:
        rank: The rank of the pp axis.
        action: What was done.
        begin: When it began, in seconds, or in the unit of the costs.
        end: When it ended.

    Example:
        >>> from colossal.pipeline import Action, Pass
        >>> Pass(0, Action("F", 0, 0), begin=1.0, end=3.0).duration
        2.0
    """

    rank: int
    action: Action
    begin: float
    end: float

    @property
    def duration(self) -> float:
        """How long it took."""
        return self.end - self.begin


def simulate(orders: PipelineOrder, placement: StagePlacement, costs: Costs | None = None) -> list[Pass]:
    """Compute when each pass of a schedule runs; `check_schedule` checks its messages too.

    Args:
        orders: What each rank does.
        placement: Which rank has which stage.
        costs: How long passes take; a backward pass twice as long as a forward pass by default.

    Returns:
        The passes of all ranks.

    Raises:
        ConfigError: Ranks wait for each other for ever.

    Example:
        >>> from colossal.pipeline import StagePlacement, one_forward_one_backward, simulate
        >>> placement = StagePlacement(2)
        >>> max(each.end for each in simulate(one_forward_one_backward(placement, 4), placement))
        15.0
    """
    costs = costs or Costs()
    done: dict[Action, Pass] = {}
    places, free = [0] * len(orders), [0.0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and _is_ready(order[places[rank]], done, placement):
                action = order[places[rank]]
                begin = max(free[rank], _ready_at(action, rank, done, placement, costs))
                done[action] = Pass(rank, action, begin, begin + costs.of(action.kind))
                free[rank], places[rank], moved = done[action].end, places[rank] + 1, True
        if not moved:
            waiting = [order[place] for place, order in zip(places, orders, strict=True) if place < len(order)]
            raise ConfigError(
                f"Each pass of a schedule waits for passes that come. Found that {waiting} wait for each other. "
                f"{ORDER_ADVICE}"
            )
    return list(done.values())


def bubble_fraction(passes: list[Pass]) -> float:
    """Compute the fraction of the time in which ranks are idle.

    Args:
        passes: The passes of all ranks.

    Returns:
        Time without a pass, of all ranks together, divided by the time from the first pass to the last.

    Example:
        >>> from colossal.pipeline import StagePlacement, bubble_fraction, one_forward_one_backward, simulate
        >>> placement = StagePlacement(2)
        >>> round(bubble_fraction(simulate(one_forward_one_backward(placement, 7), placement)), 3)
        0.125
    """
    num_ranks = 1 + max(each.rank for each in passes)
    total = max(each.end for each in passes) - min(each.begin for each in passes)
    return 1 - sum(each.duration for each in passes) / (total * num_ranks)


def _is_ready(action: Action, done: dict[Action, Pass], placement: StagePlacement) -> bool:
    needed = action.needs(placement.num_stages)
    return needed is None or needed in done


def _ready_at(action: Action, rank: int, done: dict[Action, Pass], placement: StagePlacement, costs: Costs) -> float:
    needed = action.needs(placement.num_stages)
    if needed is None:
        return 0.0
    return done[needed].end + (costs.transfer if placement.rank_of(needed.stage) != rank else 0.0)
