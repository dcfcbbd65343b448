"""Numbers of a model that tp divides."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from torch import nn

from colossal.errors import PlanError
from colossal.tensor import ParallelPlan, find_modules

_Value = TypeVar("_Value")


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
        heads, shared = attrgetter(counts.heads)(config), _number(counts.key_value_heads, config)
        if not _fits(heads, shared, size):
            fitting = [number for number in range(1, heads + 1) if _fits(heads, shared, number)]
            keys = "" if shared is None else f" and {counts.key_value_heads}={shared}"
            raise PlanError(
                "Each rank of the tp axis has equally many heads, and those of keys are divided or shared evenly. "
                f"Found {counts.heads}={heads}{keys} for tp={size}. Choose one of {', '.join(map(str, fitting))}."
            )
        found = found or shared
    return found


def keep_uneven(plan: ParallelPlan, config: Any, size: int) -> ParallelPlan:
    """Leave out attention whose heads do not divide, where a plan allows it.

    Args:
        plan: Says where.
        config: Has the numbers of heads.
        size: Ranks of the tp axis.

    Returns:
        The plan, without what is about such attention.

    Example:
        >>> from types import SimpleNamespace
        >>> from colossal.shardformer.counts import keep_uneven
        >>> from colossal.tensor import HeadCounts, ParallelPlan
        >>> plan = ParallelPlan({"attn.q": "col", "mlp.up": "col"}, counts=(HeadCounts("n_head", attention="attn"),))
        >>> keep_uneven(plan, SimpleNamespace(n_head=71), size=2).styles
        {'mlp.up': 'col'}
    """
    for counts in plan.counts:
        heads, shared = attrgetter(counts.heads)(config), _number(counts.key_value_heads, config)
        if counts.attention and not _fits(heads, shared, size):
            kept, prefix = [one for one in plan.counts if one is not counts], f"{counts.attention}."
            plan = replace(
                plan,
                styles=_without(plan.styles, prefix),
                divide_by_tp=tuple(_without(dict.fromkeys(plan.divide_by_tp), prefix)),
                counts=tuple(kept),
                cut_inputs=_without(plan.cut_inputs, prefix),
            )
    return plan


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


def _number(name: str | None, config: Any) -> int | None:
    return getattr(config, name, None) if name else None


def _without(rows: Mapping[str, _Value], prefix: str) -> dict[str, _Value]:
    return {name: value for name, value in rows.items() if not f"{name}.".startswith(prefix)}


def _fits(heads: int, shared: int | None, size: int) -> bool:
    return heads % size == 0 and (shared is None or shared % size == 0 or size % shared == 0)
