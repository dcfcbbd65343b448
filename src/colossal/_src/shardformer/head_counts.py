"""Attributes of a model, such as the number of heads, that are divided by the tp size."""

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from textwrap import shorten
from typing import Any, TypeVar

from torch import nn

from colossal._src.tensor import ParallelPlan, find_modules
from colossal.errors import PlanError
from colossal.logging import get_dist_logger

COLWISE = r"colwise(_kv|_no_reduce)?|packed_colwise\(\d\)"  # whose outputs stay sharded
_HEADS = r"(.*_)?n?heads?"
_Value = TypeVar("_Value")


def check_heads(plan: ParallelPlan, config: Any, size: int) -> int | None:
    """Check that the heads of a model can be sharded."""
    found = None
    for counts in (each for each in plan.counts if each.is_sharded):
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


def skip_uneven_attention(plan: ParallelPlan, config: Any, size: int) -> ParallelPlan:
    """Leave out attention whose heads do not divide, where a plan allows it."""
    for counts in plan.counts:
        heads, shared = attrgetter(counts.heads)(config), _number(counts.key_value_heads, config)
        if counts.attention and not _fits(heads, shared, size):
            kept, prefix = [one for one in plan.counts if one is not counts], f"{counts.attention}."
            plan = replace(
                plan,
                styles=_without(plan.styles, prefix),
                divide_by_tp=tuple(_without(dict.fromkeys(plan.divide_by_tp), prefix)),
                counts=tuple(kept),
                split_inputs=_without(plan.split_inputs, prefix),
            )
    return plan


def divide_attribute(base: nn.Module, pattern: str, size: int) -> None:
    """Divide an attribute of modules."""
    path, _, attribute = pattern.rpartition(".")
    for name, module in find_modules(base, path):
        found = getattr(module, attribute, None)
        is_elsewhere = next(module.parameters(), None) is None  # on another stage of a pipeline
        if found is None and (is_elsewhere or (not name and path)):  # a star matches the base too
            continue
        if not isinstance(found, int) or found % size:
            raise PlanError(
                f"A plan divides numbers by tp={size}. Found {attribute}={found!r} in {name}. Choose a tp that divides "
                "it, or correct the plan."
            )
        setattr(module, attribute, found // size)


def warn_of_undivided_heads(base: nn.Module, plan: ParallelPlan, size: int) -> None:
    """Log numbers of heads that a program's plan leaves as they are, by which features would be split wrongly."""
    divided = {
        (module, pattern.rpartition(".")[2])
        for pattern in plan.divide_by_tp
        for _, module in find_modules(base, f"?{pattern.removeprefix('?').rpartition('.')[0]}")
    }
    found: list[str] = []
    for pattern, style in plan.styles.items():
        for name, _ in find_modules(base, pattern) if re.fullmatch(COLWISE, style) else ():
            path = name.rpartition(".")[0]
            module = base.get_submodule(path)
            found += [
                f"{path}.{attribute}".lstrip(".")
                for attribute, value in vars(module).items()
                if re.fullmatch(_HEADS, attribute) and isinstance(value, int) and (module, attribute) not in divided
            ]
    if found:
        names = ", ".join(dict.fromkeys(found))
        get_dist_logger().warning(
            "A forward method that splits features into heads has those of its rank. Found numbers of heads that "
            f"divide_by_tp does not name, next to layers that tp={size} shards: {shorten(names, 200)}. Where forward "
            "uses one, as in view(B, L, self.n_head, -1), name it in divide_by_tp of the plan.",
            ranks=[0],
        )


def adjust_key_value_groups(base: nn.Module, num_key_value_heads: int | None, size: int) -> None:
    """Adjust how many query heads use one key head, where several ranks compute the same key head."""
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
