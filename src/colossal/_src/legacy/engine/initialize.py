"""From the parts of a program and the config that it was launched with to an engine.

What the entries of the config do:

- ``parallel``: replicas average gradients, and a pipeline runs the stages that ranks built.
- ``fp16=dict(mode=AMP_TYPE...)``: mixed precision; in a pipeline ``AMP_TYPE.NAIVE`` only.
- ``zero=dict(model_config=...)``: parameters, gradients and states are sharded over replicas.
- ``gradient_accumulation=n``: an update for each n backward passes.
- ``clip_grad_norm=1.0``: the norm that gradients are clipped to.
- ``gradient_handler=[dict(type=...)]``: gradients are reduced by these only; ``gradient_handlers`` too.
- ``NUM_MICRO_BATCHES``, ``NUM_CHUNKS``: of a pipeline; ``TENSOR_SHAPE`` is accepted, shapes are sent once.
- ``torch_ddp=dict(...)``: options of `TorchDDPPlugin`.
- ``cudnn_benchmark=True``: as of torch, and ``cudnn_deterministic``.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal._src.cluster import current_config
from colossal._src.interface import Criterion
from colossal._src.legacy.engine.engine import Engine
from colossal._src.legacy.engine.features import Features
from colossal._src.legacy.engine.gradient_handlers import build_handlers, named_handlers
from colossal._src.legacy.engine.op_hooks import BaseOpHook
from colossal._src.legacy.engine.pipeline_schedules import InterleavedPipelineSchedule, PipelineSchedule
from colossal._src.legacy.engine.schedules import NonPipelineSchedule
from colossal._src.legacy.notice import superseded
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger


@final
class AccumulatedLRScheduler:
    """The schedule of a learning rate, which counts updates where `step` is called after every pass.

    Args:
        lr_scheduler: The schedule.
        engine: Its updates are counted.
    """

    def __init__(self, lr_scheduler: LRScheduler, engine: Engine) -> None:
        self._scheduler, self._engine, self._seen = lr_scheduler, engine, engine.num_steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go on if the engine has made an update since the last call."""
        if self._engine.num_steps > self._seen:
            self._seen = self._engine.num_steps
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    criterion: Criterion | None = None,
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: LRScheduler | None = None,
    ophooks: Sequence[BaseOpHook] | None = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """Give the parts of a program the features of the config that it was launched with.

    Args:
        model: The model; of a pipeline the stage of this rank, or a `torch.nn.ModuleList` of its chunks. Or a function
            that builds it.
        optimizer: The optimizer of its parameters, or a function of these that builds it.
        criterion: The loss function.
        train_dataloader: Yields batches of this rank; returned as it is.
        test_dataloader: Yields batches of this rank; returned as it is.
        lr_scheduler: The schedule of the learning rate; under accumulation its ``step`` may be called after every pass.
        ophooks: Run before and after the passes of modules.
        verbose: Log the config on rank 0.

    Returns:
        The engine, both loaders, and the schedule; what was None stays None.

    Raises:
        ConfigError: An entry of the config is wrong, or contradicts another.
        UnsupportedError: A combination of entries is not supported; says what is.

    Communication: that of `Booster.boost`.

    Example:
        >>> import torch
        >>> from colossal.legacy import initialize
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> engine, *_ = initialize(model, optimizer, torch.nn.MSELoss(), verbose=False)
        >>> engine.backward(engine.criterion(engine(torch.ones(4, 2)), torch.ones(4, 1)))
        >>> engine.step()
        >>> engine.num_steps
        1
    """
    superseded("colossal.initialize", "Booster(plugin=...).boost(model, optimizer, criterion)")
    config = _read_config(verbose)
    model, optimizer = _build(model, optimizer, lr_scheduler)
    engine = _make_engine(config, model, optimizer, criterion, ophooks, verbose)
    accumulates = lr_scheduler is not None and engine.gradient_accumulation > 1
    scheduler: Any = AccumulatedLRScheduler(lr_scheduler, engine) if lr_scheduler and accumulates else lr_scheduler
    return engine, train_dataloader, test_dataloader, scheduler


def _read_config(verbose: bool) -> Mapping[str, Any]:
    """The config of the program, whose flags of cuDNN are set."""
    config: Mapping[str, Any] = current_config() or {}
    if verbose:
        text = json.dumps(config, indent=4, default=str, sort_keys=True)
        get_dist_logger().info(f"The config:\n{text}", ranks=[0])
    _set_cudnn(config)
    return config


def _build(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    lr_scheduler: LRScheduler | None,
) -> tuple[nn.Module, Optimizer]:
    """Build what was passed as a function."""
    if not isinstance(model, nn.Module):
        model = model()
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(model.parameters())
    if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "The lr_scheduler drives the optimizer that is passed with it. Found one that drives another. Build it "
            "from this optimizer."
        )
    return model, optimizer


def _make_engine(
    config: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Criterion | None,
    ophooks: Sequence[BaseOpHook] | None,
    verbose: bool,
) -> Engine:
    """Boost the parts as the config says."""
    entries = named_handlers(config)
    features = Features(config, tuple(entries))
    boosted, wrapped, criterion = features.boost(model, optimizer, criterion)
    return Engine(
        boosted,
        wrapped,
        criterion,
        gradient_handlers=build_handlers(entries, boosted, wrapped),
        clip_grad_norm=features.max_norm,
        ophook_list=ophooks,
        verbose=verbose,
        schedule=_schedule_of(config, features),
        gradient_accumulation=config.get("gradient_accumulation") or 1,
        features=features,
    )


def _schedule_of(config: Mapping[str, Any], features: Features) -> NonPipelineSchedule | PipelineSchedule:
    if not features.uses_pipeline:
        return NonPipelineSchedule()
    shape, number, chunks = config.get("TENSOR_SHAPE"), features.num_microbatches, features.num_model_chunks
    assert number is not None
    if chunks > 1:
        return InterleavedPipelineSchedule(number, chunks, tensor_shape=shape)
    return PipelineSchedule(number, tensor_shape=shape)


def _set_cudnn(config: Mapping[str, Any]) -> None:
    for name in ("benchmark", "deterministic"):
        value = config.get(f"cudnn_{name}")
        if value is None:
            continue
        if not isinstance(value, bool):
            raise ConfigError(f"cudnn_{name} is True or False. Found {value!r}. Write one of them.")
        setattr(torch.backends.cudnn, name, value)
