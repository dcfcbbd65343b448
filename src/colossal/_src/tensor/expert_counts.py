"""How many experts of a model are in a checkpoint, so that none is lost without a word."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence

from colossal.logging import get_dist_logger

_ONE = re.compile(r"((?:.+\.)?experts\.\d+)\..+")
"""The name of a tensor of one expert, in a list of modules."""
_ALL = re.compile(r"((?:.+\.)?experts)\.[^.]+")
"""That of a parameter with a row for each expert."""
_MATRICES = 3


def log_experts(shapes: Mapping[str, Sequence[int]], present: Container[str], source: object) -> None:
    """Log on the master how many experts a checkpoint has; nothing of a model without experts.

    Args:
        shapes: The tensors of the model, by name.
        present: The names in the checkpoint.
        source: The checkpoint.
    """
    matches = {name: _ALL.fullmatch(name) for name, shape in shapes.items() if len(shape) == _MATRICES}
    numbers = {match[1]: shapes[name][0] for name, match in matches.items() if match}
    complete: dict[str, bool] = {}
    for name in shapes:
        for expert in _experts_of(name, numbers):
            complete[expert] = complete.get(expert, True) and name in present
    if complete:
        get_dist_logger().info(f"loaded {sum(complete.values())} of {len(complete)} experts from {source}", ranks=[0])


def _experts_of(name: str, numbers: Mapping[str, int]) -> Iterator[str]:
    """Yield a name for each expert that a tensor belongs to."""
    if match := _ONE.fullmatch(name):
        yield match[1]
    if match := _ALL.fullmatch(name):
        yield from (f"{match[1]}.{number}" for number in range(numbers.get(match[1], 0)))
