"""A block that one rank runs before the others."""

from contextlib import AbstractContextManager

from torch import distributed as dist

from colossal._src.cluster import DistCoordinator
from colossal._src.legacy.notice import superseded


def priority_execution(
    executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> AbstractContextManager[None]:
    """Let one rank run a block before the others, such as one that downloads data.

    Superseded by `colossal.cluster.DistCoordinator.priority_execution`, which it calls.

    Args:
        executor_rank: The rank in the group that goes first.
        process_group: The group; all ranks by default.

    Returns:
        A context; on all ranks but the first, its block begins when the first has ended it.

    Raises:
        LaunchError: There is no such rank; or, on the others, the block failed on the one that went first.

    Communication: all-reduce, the group, 4 bytes.

    Example:
        >>> from colossal.legacy.cluster import priority_execution
        >>> from colossal.testing import run_threads
        >>> order = []
        >>> def program(rank):
        ...     with priority_execution(executor_rank=1):
        ...         order.append(rank)
        >>> from torch import distributed as dist
        >>> _ = run_threads(lambda: program(dist.get_rank()), 2)
        >>> order
        [1, 0]
    """
    superseded("priority_execution", "DistCoordinator().priority_execution()")
    return DistCoordinator().priority_execution(executor_rank, process_group)
