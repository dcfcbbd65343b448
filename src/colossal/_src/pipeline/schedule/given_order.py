"""An order of passes that a program gives, as a list of nodes for each rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol, Self, final

from colossal._src.pipeline.schedule.action import Action, ActionKind, PipelineOrder
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
from colossal._src.pipeline.schedule.verification import check_schedule
from colossal.errors import ConfigError

Schedule = Callable[[StagePlacement, int], PipelineOrder]
"""Makes the order of all ranks, from which stages they have and the number of micro-batches."""

_KIND_OF: dict[str, ActionKind] = {"F": "F", "B": "I", "W": "W"}


class ScheduleNode(Protocol):
    """One thing that a rank does."""

    @property
    def type(self) -> str:
        """``"F"``, ``"B"`` for the gradient of the input, ``"W"`` for those of weights; or a message: SEND_FORWARD."""
        ...

    @property
    def chunk(self) -> int:
        """The chunk of the rank."""
        ...

    @property
    def minibatch(self) -> int:
        """The micro-batch."""
        ...


@final
@dataclass(frozen=True)
class GivenSchedule:
    """An order of passes that is proven to end; messages are sent as they are needed."""

    num_microbatches: int
    digest: str  # of the order; ranks compare fields as text, for which the order itself is too long
    orders: PipelineOrder = field(repr=False)

    def __call__(self, placement: StagePlacement, num_microbatches: int) -> PipelineOrder:
        """Give the order, for as many micro-batches as it has."""
        self.check_number(num_microbatches)
        assert len(self.orders) == placement.num_ranks
        return self.orders

    def check_number(self, num_microbatches: int | None) -> None:
        """Refuse another number of micro-batches, if it is known."""
        if num_microbatches not in (None, self.num_microbatches):
            raise ConfigError(
                f"A schedule is of as many micro-batches as a batch has. Found one of {self.num_microbatches}, and a "
                f"batch of {num_microbatches}. Make it by PipelineGraph(n_micro={num_microbatches}, ...), or pass "
                f"num_microbatches={self.num_microbatches}."
            )

    @classmethod
    def of_nodes(cls, nodes: Sequence[Sequence[ScheduleNode | Action]], placement: StagePlacement) -> Self:
        """Read the nodes of all ranks."""
        found = [type(each).__name__ for each in nodes if not isinstance(each, Sequence)][:1]
        if found or len(nodes) != placement.num_ranks:
            raise ConfigError(
                f"A schedule has a list of nodes for each of {placement.num_ranks} ranks, and all ranks get all of "
                f"them. Found {len(nodes)} {f'elements, the first a {found[0]}' if found else 'lists'}. Pass what "
                f"PipelineGraph(n_stage={placement.num_ranks}, ...).get_v_schedule() returns."
            )
        orders = tuple(
            tuple(_action_of(node, placement.stages_of(rank)) for node in of_rank if not _is_message(node))
            for rank, of_rank in enumerate(nodes)
        )
        check_schedule(orders, placement)
        number = 1 + max((action.microbatch for action in orders[0]), default=-1)
        return cls(number, blake2b(repr(orders).encode(), digest_size=6).hexdigest(), orders)


def _is_message(node: ScheduleNode | Action) -> bool:
    return not isinstance(node, Action) and node.type.startswith(("SEND_", "RECV_"))


def _action_of(node: ScheduleNode | Action, stages: Sequence[int]) -> Action:
    if isinstance(node, Action):
        return node
    if node.type not in _KIND_OF or not 0 <= node.chunk < len(stages):
        raise ConfigError(
            f"A node is of type F, B or W, and of one of the {len(stages)} chunks of its rank. Found {node}. Make "
            "nodes by PipelineGraph(...).get_v_schedule()."
        )
    return Action(_KIND_OF[node.type], stages[node.chunk], node.minibatch)
