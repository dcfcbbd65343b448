"""A parameter that belongs to several stages."""

from dataclasses import dataclass
from typing import final

from colossal._src.pipeline.schedule.stage_placement import StagePlacement


@final
@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages have, such as an embedding tied to the head.

    Args:
        names: Its names in the full model, in the order of the stages.
        stages: The stage that has the name.

    Example:
        >>> from colossal._src.pipeline import SharedParameter
        >>> SharedParameter(("wte.weight", "lm_head.weight"), (0, 3)).stages
        (0, 3)
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]

    def ranks(self, placement: StagePlacement) -> tuple[int, ...]:
        """Find the ranks that have it.

        Args:
            placement: Which rank has which stage.

        Returns:
            The ranks of the pp axis, in ascending order.
        """
        return tuple(sorted({placement.rank_of(stage) for stage in self.stages}))
