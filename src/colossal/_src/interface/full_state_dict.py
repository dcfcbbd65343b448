"""The full state of a model whose tensors ranks shard, and what would write shards as if they were full."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from colossal._src.comm import CallOfAllRanks
from colossal._src.interface.adapter_names import is_peft_model, model_without_adapters
from colossal._src.interface.full_spec import full_spec_of
from colossal._src.interface.local_state import mark_local_state
from colossal._src.interface.partial_model import mark_partial_model
from colossal._src.interface.refusal import SAVE_AND_MERGE, refuse
from colossal._src.tensor import backing_shard, full_tensor_of, is_dtensor, placement_of, strip_compile_prefix
from colossal.errors import UnsupportedError

_EXPORT = (
    "save_pretrained writes what this process has, as if it were the full model. Found {}. Call "
    "booster.save_model(model, directory, shard=True, use_safetensors=True) on all ranks: from_pretrained loads "
    "the directory. Adapters alone are written by booster.save_lora_as_pretrained."
)


@torch.no_grad()
def full_state(model: nn.Module, is_kept: bool = True) -> dict[str, Any]:
    """Collect the state of a model in host memory, full tensors whatever ranks hold of them.

    Communication: all_gather, the ranks that shard a tensor, its bytes.
    """
    # all are gathered where none is kept too, as all ranks take part
    return {name: full for name, full in full_items(model) if is_kept}


def full_items(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Gather one tensor of the state after another, as `full_state` does; all ranks iterate to the end."""
    if full_spec_of(model) is not None:
        raise UnsupportedError(
            "A full state is that of a model whose layers are all here. Found a model that is partitioned into "
            "pipeline stages. Call booster.save_model(model, checkpoint), which writes all stages."
        )
    for name, value in model.state_dict(keep_vars=True).items():
        held = backing_shard(value)
        with CallOfAllRanks("gather the state of a model, by model.state_dict() or booster.save_model,"):
            # cloned, as `cpu()` may return the parameter itself
            full = full_tensor_of(held).detach().cpu().clone() if isinstance(held, torch.Tensor) else held
        yield name, full


def refuse_partial_export(model: nn.Module, wrapper: nn.Module) -> str:
    """Make `save_pretrained` of a model, and writing its state, raise if this rank has shards or some layers only.

    Returns:
        What this rank does not have, and its parameters do not show; empty for a full model.

    transformers, peft and `torch.save` write what a process has; they do not support our shards, and would write a
    shard under the name of the full parameter.
    """
    full_spec, all_missing = full_spec_of(model), ""
    for root in (model,) if full_spec is None else full_spec.roots:
        missing = _sharded(root) if full_spec is None else _sharded(root) or _absent(root, full_spec.names)
        if missing:
            all_missing = missing
            mark_partial_model(root, missing)
        exporters = [each for each in (root, model_without_adapters(root)) if hasattr(each, "save_pretrained")]
        if missing and exporters:
            refuse([*exporters, model], "save_pretrained", _EXPORT.format(missing))
        if is_peft_model(root) and any(is_dtensor(parameter) for parameter in root.parameters()):
            refuse([root], "merge_and_unload", f"Merging needs full parameters. Found {missing}. {SAVE_AND_MERGE}")
    if all_missing:
        mark_local_state(wrapper, all_missing)
    if all_missing and full_spec is not None:
        mark_partial_model(model, all_missing)
    return "" if any(map(is_dtensor, model.parameters())) else all_missing  # they show as full ones


def _sharded(model: nn.Module) -> str:
    """Describe a parameter of which this rank has a shard only; empty if there is none."""
    for name, parameter in model.named_parameters():
        placement = placement_of(backing_shard(parameter))
        if placement.is_compute_sharded:
            return f"{strip_compile_prefix(name)}, of whose shape {list(placement.shape)} each rank has a shard"
    return ""


def _absent(model: nn.Module, names: Any) -> str:
    """Describe a tensor that is on another pipeline stage; empty if there is none."""
    here = {strip_compile_prefix(name) for name in model.state_dict(keep_vars=True)}
    absent = next((name for name in names if name not in here), None)
    return "" if absent is None else f"a pipeline stage without {absent}"
