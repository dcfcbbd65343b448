"""Weights of sharded layers that a program's forward method uses itself, as in ``F.linear(x, self.wte.weight)``."""

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from colossal._src.tensor import placement_of
from colossal.errors import PlanError


@final
class _UsesElsewhere(TorchFunctionMode):
    """Refuses what is computed of shards while none of their layers runs."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__()
        self._names, self.depth, self.is_over = names, 0, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # not what reads a dtype, or writes values; a checkpoint opens the modes of its forward pass once more
        if self.is_over or self.depth or not isinstance(result, torch.Tensor) or not result.requires_grad:
            return result
        for each in (*args, *kwargs.values()):
            name = self._names.get(each) if isinstance(each, torch.Tensor) else None
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


def refuse_weights_elsewhere(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Watch the first training pass of a model for weights of its sharded layers that are used outside of these."""
    layers = list(dict.fromkeys(layers))

    def enter(module: nn.Module, _args: Any) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        first.remove()
        held = {id(each) for layer in layers for each in layer.parameters()}
        named = {each: name for name, each in model.named_parameters() if id(each) in held}
        mode = _UsesElsewhere({each: name for each, name in named.items() if placement_of(each).shard_groups})
        handles: list[Any] = []

        def begin(*_: Any) -> None:
            mode.depth += 1

        def end(*_: Any) -> None:
            mode.depth -= 1

        def leave(*_: Any) -> None:
            mode.is_over = True
            mode.__exit__(None, None, None)
            for handle in handles:
                handle.remove()

        for layer in layers:
            handles.append(layer.register_forward_pre_hook(begin, prepend=True))
            handles.append(layer.register_forward_hook(end, always_call=True))
        handles.append(model.register_forward_hook(leave, always_call=True))
        mode.__enter__()

    first = model.register_forward_pre_hook(enter)
