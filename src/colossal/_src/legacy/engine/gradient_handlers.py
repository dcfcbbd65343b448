"""What changes gradients between the backward pass and the step, in place of the reduction of the wrapped model."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from colossal._src.cluster import current_mesh
from colossal._src.comm import Channel, group_into_buckets
from colossal._src.interface import OptimizerWrapper
from colossal._src.legacy.registry import GRADIENT_HANDLER
from colossal._src.legacy.utils import is_using_ddp, is_using_sequence
from colossal._src.tensor import group_by_replicas
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError

_BUCKET_BYTES = 25 * 2**20


class BaseGradientHandler(ABC):
    """Reduces gradients over ranks in a program's own way; `Engine.step` calls it before it clips and updates.

    Register a subclass, and name it in the config: ``gradient_handler=[dict(type="MyGradientHandler")]``. Gradients are
    then reduced by the named handlers only.

    Args:
        model: The model of the engine.
        optimizer: Its optimizer.

    Example:
        >>> import torch
        >>> from colossal.legacy.engine import BaseGradientHandler, Engine
        >>> class Halve(BaseGradientHandler):
        ...     def handle_gradient(self):
        ...         for parameter in self._model.parameters():
        ...             parameter.grad /= 2
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> engine = Engine(model, optimizer, gradient_handlers=[Halve(model, optimizer)])
        >>> engine.backward(engine(torch.ones(1, 1)).sum())
        >>> before = model.weight.item()
        >>> engine.step()
        >>> round(before - model.weight.item(), 4)
        0.5
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerWrapper | None) -> None:
        self._model, self._optimizer = model, optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Change the gradients of the model's parameters in place."""


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages gradients over the data-parallel ranks, after the backward pass.

    Args:
        model: The model of the engine.
        optimizer: Its optimizer.

    Communication: all_reduce, dp, the gradients' bytes.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from colossal.legacy.engine import DataParallelGradientHandler
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     model.weight.grad = torch.full((1, 1), float(dist.get_rank()))
        ...     DataParallelGradientHandler(model, torch.optim.SGD(model.parameters())).handle_gradient()
        ...     return model.weight.grad.item()
        >>> run_threads(program, 2)
        [0.5, 0.5]
    """

    def handle_gradient(self) -> None:
        """Average the gradients; a parameter that no pass used has none on any rank."""
        if is_using_ddp():
            _average_replicas(self._model)


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DataParallelGradientHandler):
    """Averages the gradients of experts over the ranks that hold the same ones, and all others over dp.

    Without named handlers, the engine does so during the backward pass.

    Args:
        model: The model of the engine.
        optimizer: Its optimizer; it is not asked.

    Communication: all_reduce, dp or edp, the gradients' bytes.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.engine import MoeGradientHandler
        >>> from colossal.nn.moe import StackedExperts, shard_experts
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(ep=2) as mesh:  # the tokens of both ranks have come to each expert
        ...         experts = shard_experts(StackedExperts([torch.nn.Linear(1, 1, bias=False)] * 2), mesh)
        ...         experts.weight.grad = torch.full((1, 1, 1), float(dist.get_rank()))
        ...         MoeGradientHandler(experts, torch.optim.SGD(experts.parameters())).handle_gradient()
        ...         return experts.weight.grad.item()
        >>> run_threads(program, 2)
        [0.0, 0.5]
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerWrapper | None = None) -> None:
        super().__init__(model, optimizer)


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(BaseGradientHandler):
    """Averages gradients over the data-parallel ranks and those over which a sequence is sharded.

    Args:
        model: The model of the engine.
        optimizer: Its optimizer.

    Communication: all_reduce, dp and sp, the gradients' bytes each.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.engine import SequenceParallelGradientHandler
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(sp=2):
        ...         model = torch.nn.Linear(1, 1, bias=False)
        ...         model.weight.grad = torch.full((1, 1), float(dist.get_rank()))
        ...         SequenceParallelGradientHandler(model, torch.optim.SGD(model.parameters())).handle_gradient()
        ...         return model.weight.grad.item()
        >>> run_threads(program, 2)
        [0.5, 0.5]
    """

    def handle_gradient(self) -> None:
        """Average the gradients; a parameter that no pass used has none on any rank."""
        if is_using_sequence():
            _average(self._model.parameters(), Channel("sp"))
        if is_using_ddp():
            _average_replicas(self._model)


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(BaseGradientHandler):
    """Accepted as documented: the stages of a pipeline add up the gradients of shared modules by themselves.

    Args:
        model: The model of the engine.
        optimizer: Its optimizer.

    Example:
        >>> import torch
        >>> from colossal.legacy.engine import PipelineSharedModuleGradientHandler
        >>> model = torch.nn.Linear(1, 1)
        >>> handler = PipelineSharedModuleGradientHandler(model, torch.optim.SGD(model.parameters()))
        >>> handler.handle_gradient() is None
        True
    """

    def handle_gradient(self) -> None:
        """Leave the gradients: they are summed already."""


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Accepted as documented: a model whose gradients are sharded reduces them during the backward pass.

    Args:
        model: The model of the engine.
        optimizer: Its optimizer.

    Example:
        >>> import torch
        >>> from colossal.legacy.engine import ZeROGradientHandler
        >>> model = torch.nn.Linear(1, 1)
        >>> ZeROGradientHandler(model, torch.optim.SGD(model.parameters())).handle_gradient() is None
        True
    """

    def handle_gradient(self) -> None:
        """Leave the gradients: they are reduced already."""


def named_handlers(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The handlers that a config names, each with its own arguments."""
    given = [config[key] for key in ("gradient_handler", "gradient_handlers") if config.get(key)]
    if len(given) > 1:
        raise ConfigError(
            "Gradient handlers are listed once. Found both gradient_handler and gradient_handlers. Keep one of them."
        )
    entries: list[Any] = list(given[0]) if given and not isinstance(given[0], Mapping) else given
    for entry in entries:
        if not isinstance(entry, Mapping) or "type" not in entry:
            raise ConfigError(
                f"gradient_handler is a list of dict(type=...). Found {entry!r} in it. Write dict(type='MyHandler')."
            )
    return [dict(cast("Mapping[str, Any]", entry)) for entry in entries]


def build_handlers(
    entries: Sequence[Mapping[str, Any]], model: nn.Module, optimizer: OptimizerWrapper
) -> list[BaseGradientHandler]:
    """Make the handlers that a config names."""
    handlers: list[BaseGradientHandler] = []
    for entry in entries:
        options = dict(entry)
        kind = options.pop("type")
        made = (GRADIENT_HANDLER.get_module(kind) if isinstance(kind, str) else kind)(model, optimizer, **options)
        handlers += check_handlers([made])
    return handlers


def check_handlers(handlers: Sequence[Any]) -> list[BaseGradientHandler]:
    """Return handlers as a list, if they are such."""
    for handler in handlers:
        if not isinstance(handler, BaseGradientHandler):
            raise ConfigError(
                f"A gradient handler is a subclass of BaseGradientHandler. Found {handler!r}. Inherit "
                "colossal.legacy.engine.BaseGradientHandler."
            )
    return list(handlers)


def _average_replicas(model: nn.Module) -> None:
    """Average gradients over the ranks that compute them of other samples; those of experts come from all of ep."""
    for replicas, parameters in group_by_replicas(model.parameters(), current_mesh()).items():
        _average(parameters, replicas.channel(), replicas.num_means)


def _average(all_parameters: Iterable[nn.Parameter], channel: Channel, num_means: int | None = None) -> None:
    """Take the mean over the ranks of an axis, or of a number of losses, of the gradients that there are."""
    parameters = [each for each in all_parameters if each.requires_grad]
    used = channel.all_reduce(
        torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32, device=get_current_device()),
        "max",
    )
    chosen = [each for each, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
    for parameter in chosen:
        if parameter.grad is None:  # another rank has used it
            parameter.grad = torch.zeros_like(parameter)
    for bucket in group_into_buckets([each.grad for each in chosen if each.grad is not None], _BUCKET_BYTES):
        mean = channel.all_reduce(torch.cat([grad.reshape(-1) for grad in bucket])) / (num_means or channel.size)
        for grad, part in zip(bucket, mean.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
