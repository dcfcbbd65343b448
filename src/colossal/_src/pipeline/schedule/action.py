"""One thing that a rank does in a step of a pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

ActionKind = Literal["F", "B", "I", "W"]
"""A forward pass, a backward pass, or the two parts of one: the gradient of the input, then those of weights."""


ORDER_ADVICE = (
    "On each rank, put F after F of the stage before, B or I after F of its stage and after B or I of the next stage, "
    "and W after its I, in the same order of micro-batches on both sides of a link."
)
"""What a schedule must be like that does not end."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: What is done.
        stage: The stage of the pipeline.
        microbatch: The micro-batch.

    Example:
        >>> from colossal.pipeline import Action
        >>> Action("F", stage=1, microbatch=0)
        F1.0
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    def needs(self, num_stages: int) -> "Action | None":
        """Find what must be done before, on this rank or another one.

        Args:
            num_stages: Stages of the pipeline.

        Returns:
            The pass of an adjacent stage or of the same one; None for the first pass.

        Example:
            >>> from colossal.pipeline import Action
            >>> Action("F", 1, 0).needs(2), Action("B", 1, 0).needs(2), Action("I", 0, 0).needs(2)
            (F0.0, F1.0, I1.0)
        """
        if self.kind == "F":
            return Action("F", self.stage - 1, self.microbatch) if self.stage else None
        if self.kind == "W":
            return Action("I", self.stage, self.microbatch)
        if self.stage == num_stages - 1:
            return Action("F", self.stage, self.microbatch)
        return Action(self.kind, self.stage + 1, self.microbatch)


PipelineOrder = tuple[tuple[Action, ...], ...]
"""What each rank does, in its order."""


@final
@dataclass(frozen=True)
class Costs:
    """How long passes through a stage take, in any unit.

    Args:
        forward: A forward pass.
        inputs: The gradient of the input.
        weights: The gradients of the weights.
        transfer: A message between two ranks.

    Example:
        >>> from colossal.pipeline import Costs
        >>> Costs().of("B")
        2.0
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    transfer: float = 0.0

    def of(self, kind: ActionKind) -> float:
        """Look up how long a pass takes.

        Args:
            kind: The kind of pass.

        Returns:
            The time.
        """
        known: Mapping[ActionKind, float] = {"F": self.forward, "I": self.inputs, "W": self.weights}
        return known.get(kind, self.inputs + self.weights)
