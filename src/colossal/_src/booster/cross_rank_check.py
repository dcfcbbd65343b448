"""All ranks boost the same: what differs between them would train on silently, or hang."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import xxhash
from torch import distributed as dist

from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin.base import Plugin
from colossal._src.booster.plugin.dataloader import ShardedLoader
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import equal_text_on_all_ranks, gather_objects
from colossal._src.interface import Parts
from colossal._src.pipeline import StageModules
from colossal._src.tensor import parameter_names, placement_of
from colossal.errors import ConfigError

_SHOWN = 3
_PLAIN = (str, int, float, bool, complex, torch.dtype, torch.device, type(None))
_DATA = (*_PLAIN, list, tuple, dict)


def check_agreement(
    parts: Parts, plugin: Plugin, precision: MixedPrecision | None, mesh: ParallelMesh, axes: Sequence[Axis]
) -> None:
    """Make sure that all ranks have the same model, optimizer, loader, plugin and precision, but for values of tensors.

    Communication: all_reduce, the axes, 16 bytes, three times for `StageModules`; if something differs,
    all_gather_object, all ranks.
    """
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if not axes:
        return
    common, own = dict(_describe_common(parts, plugin, precision)), dict(_describe_own(parts))
    # Where the user built each stage, only the ranks that have the same stage have the same modules.
    stage = mesh.rank("pp") if isinstance(parts.model, StageModules) else None
    is_equal = equal_text_on_all_ranks(repr(common if stage is not None else (common, own)), _groups(mesh, axes))
    if is_equal and stage is not None:
        is_equal = equal_text_on_all_ranks(repr(own), _groups(mesh, [axis for axis in axes if axis != "pp"]))
        is_equal = equal_text_on_all_ranks(repr(is_equal), _groups(mesh, axes)) and is_equal
    if is_equal:
        return
    # long texts: they are sent only to name a difference that the digests have shown
    ranks = gather_objects((stage, common, own), purpose="compares what it boosts")
    differences = [
        *_differences([(None, common) for _, common, _ in ranks]),
        *_differences([(stage, own) for stage, _, own in ranks]),
    ]
    shown = "; ".join(differences[:_SHOWN]) + (f"; and {len(differences) - _SHOWN} more" * (len(differences) > _SHOWN))
    raise ConfigError(
        "All ranks boost the same model, optimizer and data loader, with the same plugin and precision. Found that "
        f"they differ in {shown}. Build the same ones on all ranks: what the program draws may depend on the rank, "
        "these may not."
    )


def _groups(mesh: ParallelMesh, axes: Iterable[Axis]) -> list[dist.ProcessGroup]:
    return [mesh.group(axis) for axis in axes]


def _differences(ranks: Sequence[tuple[int | None, dict[str, str]]]) -> Iterator[str]:
    """Compare the descriptions of all ranks, each with the first one of the same stage."""
    firsts: dict[int | None, int] = {}
    shown = set[tuple[int | None, str]]()
    for rank, (stage, description) in enumerate(ranks):
        first = firsts.setdefault(stage, rank)
        expected = ranks[first][1]
        for name in dict.fromkeys((*expected, *description)):
            if expected.get(name) != description.get(name) and (stage, name) not in shown:
                shown.add((stage, name))
                found = f"{expected.get(name, 'nothing')} on rank {first}, {description.get(name, 'nothing')}"
                yield f"{name} ({found} on rank {rank})"


def _describe_common(parts: Parts, plugin: Plugin, precision: MixedPrecision | None) -> Iterator[tuple[str, str]]:
    """Say what all ranks must have, whatever parameters they hold, by what it is called."""
    yield "the plugin", _text(plugin)
    yield "the precision", _text(precision)
    if isinstance(parts.dataloader, ShardedLoader):
        for name, value in parts.dataloader.description.items():
            yield f"{name} of the data loader", repr(value)
    yield "the kind of model", "StageModules" if isinstance(parts.model, StageModules) else "a full model"
    if parts.optimizer is not None:
        yield "the optimizer", type(parts.optimizer).__name__
        yield from describe_groups(parts.optimizer.param_groups)


def describe_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Say which hyperparameters the groups of an optimizer have, by what they are called."""
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield f"{key} of the optimizer's group {number}", _text(value)


def _describe_own(parts: Parts) -> Iterator[tuple[str, str]]:
    """Say what ranks with the same parameters must have, by what it is called."""
    names = parameter_names(parts.model)
    for name, parameter in parts.model.named_parameters():
        trains = "trains" if parameter.requires_grad else "frozen"
        yield f"parameter {name}", f"{list(placement_of(parameter).shape)} {parameter.dtype} {trains}"
    for name, buffer in parts.model.named_buffers():
        yield f"buffer {name}", f"{list(buffer.shape)} {buffer.dtype}"
    if parts.optimizer is not None:
        for number, group in enumerate(parts.optimizer.param_groups):
            for parameter in group["params"]:
                entries = parts.optimizer.state.get(parameter, {})
                kinds = {
                    key: f"{list(each.shape)} {each.dtype}" for key, each in entries.items() if torch.is_tensor(each)
                }
                if kinds:
                    yield f"the optimizer's state of {names.get(parameter, ['a parameter'])[0]}", _text(kinds)
            held = [names[parameter][0] for parameter in group["params"] if parameter in names]
            yield f"the parameters of the optimizer's group {number}", _shortened(held)


def _shortened(names: Sequence[str]) -> str:
    """The names themselves where they are few, and a hash of all of them."""
    digest = xxhash.xxh3_64_hexdigest("\n".join(names).encode())
    return f"{len(names)}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''} [{digest[:6]}]"


def _text(value: Any) -> str:
    """Write plain data as it is, and of other objects their class and the plain data that they hold."""
    if isinstance(value, torch.device):
        return value.type  # each rank has a device of its own
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() == 1 else f"a tensor of the shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + _join(f"{key}: {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + _join(map(_text, value)) + "]"
    if is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
    else:
        held = {name.lstrip("_"): each for name, each in getattr(value, "__dict__", {}).items()}
    data = {
        name: each
        for name, each in held.items()
        if isinstance(each, (*_PLAIN, list, tuple, dict)) or is_dataclass(each)
    }
    return f"{type(value).__name__}({_join(f'{name}={_text(each)}' for name, each in data.items())})"


def _join(texts: Iterable[str]) -> str:
    return ", ".join(texts)
