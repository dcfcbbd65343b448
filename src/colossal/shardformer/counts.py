"""Numbers of a model that tp divides."""

from typing import Any

from torch import nn

from colossal.errors import PlanError
from colossal.tensor import HeadCounts, ParallelPlan, find_modules


def check_heads(plan: ParallelPlan, config: Any, size: int) -> int | None:
    """Make sure that the heads of a model can be divided.

    Args:
        plan: Names them.
        config: Has them.
        size: Ranks of the tp axis.

    Returns:
        How many heads keys and values have, if the plan says so.

    Raises:
        PlanError: They cannot; it names the numbers of ranks that can.

    Example:
        >>> from types import SimpleNamespace
        >>> from colossal.shardformer.counts import check_heads
        >>> from colossal.tensor import HeadCounts, ParallelPlan
        >>> plan = ParallelPlan({}, counts=(HeadCounts("n_head", "n_kv"),))
        >>> check_heads(plan, SimpleNamespace(n_head=8, n_kv=2), size=4)
        2
    """
    found = None
    for counts in plan.counts:
        heads, shared = getattr(config, counts.heads), _key_value_heads(counts, config)
        if not _fits(heads, shared, size):
            fitting = [number for number in range(1, heads + 1) if _fits(heads, shared, number)]
            keys = "" if shared is None else f" and {counts.key_value_heads}={shared}"
            raise PlanError(
                "Each rank of the tp axis has equally many heads, and those of keys are divided or shared evenly. "
                f"Found {counts.heads}={heads}{keys} for tp={size}. Choose one of {', '.join(map(str, fitting))}."
            )
        found = found or shared
    return found


def divide_number(base: nn.Module, pattern: str, size: int) -> None:
    """Divide an attribute of modules.

    Args:
        base: The base model.
        pattern: Names modules, and at its end the attribute.
        size: What it is divided by.

    Raises:
        PlanError: There is no such number, or it does not divide.

    Example:
        >>> from torch import nn
        >>> from colossal.shardformer.counts import divide_number
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> divide_number(model, "0.out_features", 2)
        >>> model[0].out_features
        2
    """
    path, _, attribute = pattern.rpartition(".")
    for name, module in find_modules(base, path):
        found = getattr(module, attribute, None)
        if not isinstance(found, int) or found % size:
            raise PlanError(
                f"A plan divides numbers by tp={size}. Found {attribute}={found!r} in {name}. Choose a tp that divides "
                "it, or correct the plan."
            )
        setattr(module, attribute, found // size)


def share_groups(base: nn.Module, num_key_value_heads: int | None, size: int) -> None:
    """Adjust how many heads of queries use one of keys, where ranks share those.

    Args:
        base: The base model.
        num_key_value_heads: Heads of keys and values of the whole model.
        size: Ranks of the tp axis.

    Example:
        >>> from torch import nn
        >>> from colossal.shardformer.counts import share_groups
        >>> attention = nn.Module()
        >>> attention.num_key_value_groups = 4
        >>> share_groups(attention, num_key_value_heads=2, size=4)
        >>> attention.num_key_value_groups
        2
    """
    if num_key_value_heads is None or num_key_value_heads >= size:
        return
    for module in base.modules():
        groups = getattr(module, "num_key_value_groups", None)
        if isinstance(groups, int):
            attention: Any = module
            attention.num_key_value_groups = groups * num_key_value_heads // size


def _key_value_heads(counts: HeadCounts, config: Any) -> int | None:
    return getattr(config, counts.key_value_heads, None) if counts.key_value_heads else None


def _fits(heads: int, shared: int | None, size: int) -> bool:
    return heads % size == 0 and (shared is None or shared % size == 0 or size % shared == 0)
