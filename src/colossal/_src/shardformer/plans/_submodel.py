"""The plan of a part of a model, which is a model by itself too."""

from dataclasses import replace

from colossal._src.tensor import HeadCounts, ParallelPlan


def submodel_plan(plan: ParallelPlan, begin: str, is_inside: bool = True) -> ParallelPlan:
    """Choose the rows of a part."""
    prefix_length = len(begin) if is_inside else 0
    styles = {name.removeprefix("?"): style for name, style in plan.styles.items()}
    numbers = [name.removeprefix("?") for name in plan.divide_by_tp]
    return replace(
        plan,
        styles={name[prefix_length:]: style for name, style in styles.items() if name.startswith(begin)},
        divide_by_tp=tuple(name[prefix_length:] for name in numbers if name.startswith(begin)),
        counts=(HeadCounts(),),
        nested=(),
        stages=None if is_inside else plan.stages,
    )
