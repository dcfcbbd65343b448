"""What is checked of a plan that a program passes: nobody has tested it with its model."""

from collections.abc import Callable, Iterable
from itertools import chain

from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.shardformer.compared_blocks import blocks_to_compare
from colossal._src.shardformer.head_counts import warn_of_undivided_heads
from colossal._src.shardformer.weights_elsewhere import refuse_weights_elsewhere
from colossal._src.tensor import ParallelPlan, base_model_of, find_modules, unwrap_adapters


def checks_of_own_plan(
    model: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, shards_tokens: bool
) -> Callable[[], None]:
    """Prepare the checks of a plan before it is applied; what is returned sets them up afterwards."""
    base = base_model_of(model)
    # where tokens are sharded too, a block alone sees some of them
    blocks = [] if shards_tokens else blocks_to_compare(base, plan, mesh)

    def set_up() -> None:
        warn_of_undivided_heads(base, plan, mesh.size("tp"))
        for block in blocks:
            block.watch(base)
        refuse_weights_elsewhere(unwrap_adapters(model), _sharded_layers(model, base, plan))

    return set_up


def _sharded_layers(model: nn.Module, base: nn.Module, plan: ParallelPlan) -> Iterable[nn.Module]:
    of_heads = (find_modules(model, f"?{pattern}") for pattern in plan.head_styles)
    of_base = ((name, module) for name, module, _ in plan.for_stage().rows(base))
    return (module for _, module in chain(of_base, *of_heads))
