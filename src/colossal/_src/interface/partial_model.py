"""What a program does with a model of which this rank has shards or some layers, as if they were the full model."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from torch import nn

from colossal._src.interface.full_spec import full_spec_of
from colossal._src.interface.local_state import mark_local_state
from colossal._src.tensor import backing_shard, placement_of
from colossal.errors import CheckpointError
from colossal.logging import get_dist_logger

_LOAD = (
    "Save a state dict by torch.save, and call booster.load_model(model, file) on all ranks: it reads one of full "
    "tensors, and each rank takes its part."
)


def mark_partial_model(model: nn.Module, missing: str) -> None:
    """Let a model, or its wrapper, say that its state is that of this rank, when it is written and when it is loaded.

    Args:
        model: A module whose state this rank has a part of.
        missing: What this rank does not have.
    """
    mark_local_state(model, missing)
    model.register_load_state_dict_pre_hook(partial(_refuse_full_state, missing))


def _refuse_full_state(missing: str, module: nn.Module, state: Mapping[str, Any], prefix: str, *_found: object) -> None:
    """Reject the state of a full model before anything is loaded: torch would name sizes, or stages, and no remedy."""
    full_spec = full_spec_of(module)
    if full_spec is not None:
        found = next((name for name in full_spec.names if f"{prefix}{name}" in state), "")
    else:
        found = next(
            (name for name, each in module.named_parameters() if _is_full(state.get(f"{prefix}{name}"), each)), ""
        )
    if found:
        raise CheckpointError(
            "load_state_dict of a model in parts takes what its own state_dict() returned on this rank. Found a full "
            f"{found}, and a model of one rank, with {missing}. {_LOAD}"
        )


def _is_full(value: Any, parameter: nn.Parameter) -> bool:
    full, found = tuple(placement_of(backing_shard(parameter)).shape), tuple(getattr(value, "shape", ()))
    return found == full != tuple(parameter.shape)


def refuse_own_names(wrapper: nn.Module, state: Mapping[str, Any], prefix: str, *_found: object) -> None:
    """Reject, for the wrapper, a state with the names of the user's own model: with ``strict=False`` nothing is loaded.

    Args:
        wrapper: What `boost` returned.
        state: What is about to be loaded.
        prefix: What names of the wrapper's state begin with.

    Raises:
        CheckpointError: No name of the state is one of the wrapper.
    """
    names = {name for name, _ in wrapper.named_parameters()}
    own = next((name for name in state if any(each.endswith(f".{name}") for each in names)), "")
    if own and not any(f"{prefix}{name}" in state for name in names):
        raise CheckpointError(
            "Names in the state of a boosted model begin with `module.`. Found those of the model that was boosted, "
            f"such as {own}. Call model.unwrap().load_state_dict(state), or booster.load_model(model, file) on all "
            "ranks, which reads full tensors whatever ranks shard."
        )


@cache
def warn_of_partial_values(missing: str) -> None:
    """Say once that parameters are those of this rank: most programs only pass them on, and some add them up."""
    get_dist_logger().warning(
        f"model.parameters() are those of one rank, with {missing}. What a program computes of them, and of their "
        "gradients, is of this part: count parameters before boost; measure and clip gradients by the optimizer, "
        "get_grad_norm() and clip_grad_by_norm(max_norm); average weights in a copy, copy.deepcopy(model); and take "
        "full values from model.state_dict(only_rank_0=False), or in a pipeline from what booster.save_model writes.",
        ranks=[0],
    )
