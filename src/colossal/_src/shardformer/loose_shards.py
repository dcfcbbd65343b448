"""Shards that leave their layers in a program's own model, as if they were whole.

``F.linear(x, self.wte.weight)`` uses the rows of this rank only, and a model that returns what a colwise layer makes
returns the features of this rank.
"""

import re
import weakref
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from colossal._src.shardformer.head_counts import COLWISE
from colossal._src.tensor import placement_of, remove_hook
from colossal.errors import PlanError


@final
class _FirstPass(TorchFunctionMode):
    """Refuses what is computed of weights that are sharded while none of their layers runs."""

    def __init__(self, weights: Mapping[torch.Tensor, str]) -> None:
        super().__init__()
        self._weights, self._depth, self._is_over = weights, 0, False
        self._made: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._handles: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # not what reads a dtype, or writes values; a checkpoint opens the modes of its forward pass once more
        if self._is_over or self._depth or not isinstance(result, torch.Tensor) or not result.requires_grad:
            return result
        for each in (*args, *kwargs.values()):
            name = self._weights.get(each) if isinstance(each, torch.Tensor) else None
            if name is not None and each is not result:
                raise PlanError(
                    "The weight of a layer that a plan shards is used by the layer, which knows that it has a part of "
                    f"it. Found that a forward method uses {name} itself, by {getattr(func, '__name__', func)}, of "
                    f"which this rank has {tuple(each.shape)}. For an output layer that is tied to the embedding, "
                    "write self.head = nn.Linear(width, vocabulary, bias=False) and self.head.weight = "
                    "self.wte.weight, call it, and give it the style 'lm_head' or 'colwise_gather_output'; or leave "
                    "the layer out of the plan."
                )
        return result

    def begin(self, model: nn.Module, layers: Mapping[str, tuple[nn.Module, str]]) -> None:
        """Watch the layers until the model has returned."""
        for name, (layer, style) in layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._enter_layer, prepend=True))
            self._handles.append(layer.register_forward_hook(self._leave_layer, always_call=True))
            if re.fullmatch(COLWISE, style):
                self._handles.append(layer.register_forward_hook(self._remember(name)))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))
        self.__enter__()

    def _enter_layer(self, *_: Any) -> None:
        self._depth += 1

    def _leave_layer(self, *_: Any) -> None:
        self._depth -= 1

    def _remember(self, name: str) -> Any:
        def note(_layer: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self._made.append((name, weakref.ref(output)))

        return note

    def _end(self, model: nn.Module, _args: Any, output: Any) -> None:
        self._is_over = True
        self.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        returned = {id(each) for each in tree_leaves(output)}
        for name, made in self._made:
            if (found := made()) is not None and id(found) in returned:
                raise PlanError(
                    "A model returns what it returns on one rank, unless its plan says otherwise. Found that "
                    f"{type(model).__name__} returns the output of {name}, whose style leaves it sharded: this rank "
                    f"has {tuple(found.shape)}. Give the layer the style 'colwise_gather_output'; or 'lm_head' for "
                    "logits; or, for a loss of your own that knows of shards, write "
                    "ParallelPlan(..., compare_blocks=False)."
                )


def refuse_loose_shards(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Watch the first training pass of a model, whose layers have the styles of a plan."""

    def enter(module: nn.Module, _args: Any) -> None:
        if not module.training:
            return
        remove_hook(module, first.id)
        layers = {name: (module.get_submodule(name), style) for name, style in styles.items()}
        held = {id(each) for layer, _ in layers.values() for each in layer.parameters()}
        weights: dict[torch.Tensor, str] = {
            each: name
            for name, each in module.named_parameters()
            if id(each) in held and placement_of(each).shard_groups
        }
        _FirstPass(weights).begin(module, layers)

    # sharded layers end graphs in any case
    uncompiled: Any = torch.compiler.disable(enter)
    first = model.register_forward_pre_hook(uncompiled)
