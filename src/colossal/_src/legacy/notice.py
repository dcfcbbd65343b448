"""Says once that a name of the older API is superseded, and by what."""

from colossal.logging import get_dist_logger

_reported: set[str] = set()


def superseded(name: str, instead: str) -> None:
    """Log, once in a process and on rank 0, that a name of the older API works and has a successor.

    Args:
        name: The name as programs write it, for example ``colossal.initialize``.
        instead: What does the same today, for example ``Booster(plugin=...).boost(...)``.
    """
    if name not in _reported:
        _reported.add(name)
        get_dist_logger().info(
            f"{name} belongs to the older API and goes on working. New programs write: {instead}", ranks=[0]
        )
