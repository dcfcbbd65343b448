"""Keep one stage of a model, whose forward method stays as it is."""

import copy
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from colossal._src.pipeline.partition import stage_of_layer
from colossal._src.pipeline.placeholders import (
    HIDDEN,
    RESULT,
    ComputedEncoder,
    InputPlaceholder,
    MetaModule,
    NextStageLayer,
    PreviousStageLayer,
    StageBoundary,
)
from colossal._src.pipeline.schedule.stage_placement import SharedParameter
from colossal._src.tensor import Stages, base_model_of, parameter_names, stop_caching
from colossal.errors import PlanError


class _List(NamedTuple):
    """One list of layers, and which of all layers of the model it has."""

    table: Stages
    span: range


def count_layers(model: nn.Module, stages: Stages) -> int:
    """Count the layers that are partitioned into the stages of a pipeline.

    Args:
        model: The full model.
        stages: What the plan of its family says.

    Returns:
        Their number, of all lists together.

    Raises:
        PlanError: The model has no such list.

    Example:
        >>> from torch import nn
        >>> from colossal.pipeline import count_layers
        >>> from colossal.tensor import Stages
        >>> count_layers(nn.ModuleDict({"blocks": nn.ModuleList([nn.Identity()] * 3)}), Stages("blocks", pre_layers=()))
        3
    """
    return len(layers_of(model, stages))


def layers_of(model: nn.Module, stages: Stages) -> list[nn.Module]:
    """Find the layers that are partitioned into the stages of a pipeline."""
    base = base_model_of(model)
    lists: list[Any] = [base.get_submodule(each.table.layers) for each in _lists_of(base, stages)]
    return [layer for each in lists for layer in each]


def extract_stage(
    model: nn.Module, stages: Stages, layers: Sequence[range], stage: int
) -> tuple[StageBoundary, list[SharedParameter]]:
    """Leave one stage of a model, in place."""
    base, kept = base_model_of(model), layers[stage]
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    lists = _lists_of(base, stages)
    # Before modules are replaced, as their parameters lose their names then.
    shared = _find_tied(model, prefix, lists, layers)
    stop_caching(model)
    passage = StageBoundary(_values_at_boundary(kept.start, lists), _values_at_boundary(kept.stop, lists))
    names = [f"{prefix}{name}" for each in lists for name in _extract_layers(base, each, kept, passage)]
    if stage < len(layers) - 1:
        later = {f"{prefix}{name}" for each in lists for name in each.table.pre_layers}
        _drop_other_stages(model, names, later)
    return passage, shared


def copy_structure(model: nn.Module) -> nn.Module:
    """Copy the modules of a model, but not its parameters and buffers."""
    tensors = chain(model.parameters(), model.buffers())
    # The memo maps tensors to themselves: stages of one rank keep tied parameters as one object.
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _lists_of(base: nn.Module, stages: Stages) -> list[_List]:
    found, begin = [], 0
    for table in stages.lists_in(base):
        held = base.get_submodule(table.layers)
        assert isinstance(held, nn.ModuleList)
        found.append(_List(table, range(begin, begin + len(held))))
        begin += len(held)
    return found


def _values_at_boundary(border: int, lists: Sequence[_List]) -> tuple[str, ...]:
    """The values that pass a stage boundary before a layer: the result of an earlier list and hidden states."""
    for place, (table, span) in enumerate(lists):
        if border in span:
            result = (RESULT,) if place else ()
            if border == span.start:
                return result
            return (HIDDEN, *filter(None, table.layer_outputs[1:]), *result)
    return ()


def _extract_layers(base: nn.Module, each: _List, kept: range, passage: StageBoundary) -> Iterator[str]:
    """Replace layers of other stages by placeholders; yield the names of the modules that stay."""
    (table, span), held = each, base.get_submodule(each.table.layers)
    assert isinstance(held, nn.ModuleList)
    if kept.stop <= span.start:
        return
    yield from table.pre_layers
    if kept.start > span.start:
        source = HIDDEN if kept.start < span.stop else RESULT
        for name in table.pre_layers:
            _replace_input_module(base, name, passage, source, makes_states=name == table.pre_layers[0])
    if kept.start >= span.stop:
        if table.result:
            replace_submodule(base, table.result, ComputedEncoder(base.get_submodule(table.result), passage))
        return
    _replace_layers(held, table, range(kept.start - span.start, kept.stop - span.start), passage)
    yield table.layers
    if table.result and kept.stop >= span.stop:
        yield table.result
        _keep_result(base.get_submodule(table.result), passage, ends=kept.stop == span.stop)


def _replace_layers(held: nn.ModuleList, table: Stages, kept: range, passage: StageBoundary) -> None:
    names = [f"{table.layers}[{place}]" for place in range(len(held))]
    if kept.start > 0:
        passage.watch_first_layer(held[kept.start], names[kept.start])
    for place, layer in enumerate(held):
        if place < kept.start:
            is_last = place == kept.start - 1
            held[place] = PreviousStageLayer(passage, table.layer_outputs, names[place], is_last=is_last)
        elif place >= kept.stop:
            held[place] = NextStageLayer(layer, passage)


def _keep_result(module: nn.Module, passage: StageBoundary, ends: bool) -> None:
    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        passage.values[RESULT] = output if isinstance(output, torch.Tensor) else output[0]
        if ends:
            raise passage.leave({})

    module.register_forward_hook(keep)


def _replace_input_module(base: nn.Module, name: str, passage: StageBoundary, source: str, makes_states: bool) -> None:
    """Let what makes hidden states of the inputs do nothing."""
    native = _find(base, name)
    if isinstance(native, nn.Parameter):
        path, _, last = name.rpartition(".")
        delattr(base.get_submodule(path), last)
        # It is added to hidden states, which have it already; not persistent, as it is no part of a checkpoint.
        zeros = torch.zeros(native.shape, dtype=native.dtype)
        base.get_submodule(path).register_buffer(last, zeros, persistent=False)
    elif isinstance(native, nn.Module):
        replace_submodule(base, name, InputPlaceholder(native, passage, source, name, makes_states))


def _find(base: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    try:
        return getattr(base.get_submodule(path), last, None)
    except AttributeError:
        return None


def replace_submodule(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module into the place of one."""
    path, _, last = name.rpartition(".")
    setattr(root.get_submodule(path), last, module)


def _find_tied(model: nn.Module, prefix: str, lists: Sequence[_List], layers: Sequence[range]) -> list[SharedParameter]:
    found = []
    for known in parameter_names(model).values():
        # Reversed, so that of several names on one stage the first one stays.
        by_stage = {_stage_of(name.removeprefix(prefix), lists, layers): name for name in reversed(known)}
        if len(by_stage) > 1:
            indices = tuple(sorted(by_stage))
            found.append(SharedParameter(tuple(by_stage[index] for index in indices), indices))
    return found


def _stage_of(name: str, lists: Sequence[_List], layers: Sequence[range]) -> int:
    """Find the stage that has a parameter of the base model, or of its head."""
    for table, span in lists:
        if name.startswith(f"{table.layers}."):
            index = int(name.removeprefix(f"{table.layers}.").partition(".")[0])
            return stage_of_layer(layers, span.start + index)
        if any(f"{name}.".startswith(f"{first}.") for first in table.pre_layers):
            return stage_of_layer(layers, span.start)
    for table, span in lists[:-1]:
        if name.startswith(f"{table.result}."):
            return stage_of_layer(layers, span.stop - 1)
    return len(layers) - 1


def _drop_other_stages(module: nn.Module, kept: Collection[str], later: Collection[str], path: str = "") -> None:
    """Take everything with parameters away that is not named, nor around something that is."""
    for name, child in list(module.named_children()):
        here = f"{path}{name}"
        if here in kept:
            continue
        if any(each.startswith(f"{here}.") for each in kept):
            _drop_other_stages(child, kept, later, f"{here}.")
        elif next(child.parameters(), None) is not None:
            setattr(module, name, MetaModule(child))
    for name, _ in list(module.named_parameters(recurse=False)):
        if f"{path}{name}" in kept:
            continue
        if f"{path}{name}" not in later:
            raise PlanError(
                "What belongs to the first stage or to the last is a module of its own, or a parameter that the plan "
                f"names. Found the parameter {path}{name} of {type(module).__name__}, which is around the layers. "
                "Name it in pre_layers of Stages if it is used before the layers; else use a plan without stages."
            )
        delattr(module, name)
