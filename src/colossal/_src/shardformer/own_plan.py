"""What is checked of a plan that is not the table of a family: nobody has tested it with its model."""

from collections.abc import Callable
from typing import Any

from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.shardformer.compared_blocks import blocks_to_compare
from colossal._src.shardformer.head_counts import warn_of_undivided_heads
from colossal._src.shardformer.loose_shards import refuse_loose_shards
from colossal._src.tensor import ParallelPlan, base_model_of, find_modules, unwrap_adapters
from colossal.logging import get_dist_logger


def checks_of_own_plan(
    model: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, shards_tokens: bool
) -> Callable[[], None]:
    """Prepare the checks of a plan before it is applied; what is returned sets them up afterwards."""
    base = base_model_of(model)
    blocks = blocks_to_compare(base, plan, mesh)
    if shards_tokens and blocks:  # a block alone sees some of the tokens
        get_dist_logger().warning(
            "The blocks of an own plan are compared with those of one rank where each rank has all tokens. Found "
            f"sequence parallelism, under which those of the plan for {type(model).__name__} are not compared. Train "
            "one step without it, which compares them, and then write ParallelPlan(..., compare_blocks=False).",
            ranks=[0],
        )
        blocks = []

    def set_up() -> None:
        warn_of_undivided_heads(base, plan, mesh.size("tp"))
        for block in blocks:
            block.watch(base)
        if plan.compare_blocks:
            whole = unwrap_adapters(model)
            refuse_loose_shards(whole, _styles_in(whole, base, plan))
            for module in whole.modules():
                if vars(module).get("_compiled_call_impl") is not None:
                    _run_first_uncompiled(module)

    return set_up


def _run_first_uncompiled(module: nn.Module) -> None:
    """Let the first training pass of a module that is compiled in place run as Python, so that hooks see it."""
    inside: Any = module
    compiled = inside._compiled_call_impl  # noqa: SLF001 (torch has no public name for it)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return compiled(*args, **kwargs)
        inside._compiled_call_impl = compiled  # noqa: SLF001 (as above)
        return inside._call_impl(*args, **kwargs)  # noqa: SLF001 (as above)

    inside._compiled_call_impl = call  # noqa: SLF001 (as above)


def _styles_in(model: nn.Module, base: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    """The styles of the sharded layers by their names in the model."""
    styles = {module: style for _, module, style in plan.for_stage().rows(base)}
    for pattern, style in plan.head_styles.items():
        styles |= {module: style for _, module in find_modules(model, f"?{pattern}")}
    return {name: styles[module] for name, module in model.named_modules() if module in styles}
