"""Model, optimizer and criterion in one object, with the features of a config."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.interface import Criterion, OptimizerWrapper
from colossal._src.legacy.engine.features import Features
from colossal._src.legacy.engine.gradient_handlers import BaseGradientHandler, check_handlers
from colossal._src.legacy.engine.op_hooks import AttachedHooks, BaseOpHook
from colossal._src.legacy.engine.pipeline_schedules import PipelineSchedule
from colossal._src.legacy.engine.schedules import BaseSchedule, NonPipelineSchedule
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.utils.parallel_state import note_loss_scale
from colossal.errors import ConfigError, UnsupportedError


@final
class Engine:
    """Trains by the verbs of a single process; `initialize` makes one with the features of the config.

    With `gradient_accumulation` n, each loss counts for 1/n, `step` updates at every n-th call, and `zero_grad` keeps
    what is being accumulated; gradients are reduced over ranks with the last of them.

    Args:
        model: The model, or what a booster returned for it.
        optimizer: The optimizer of its parameters, or what a booster returned for it.
        criterion: The loss function.
        gradient_handlers: Change the gradients before each update, in place of the reduction of the wrapped model.
        clip_grad_norm: Clip the common norm of the gradients to it before each update; 0 does not.
        ophook_list: Run before and after the passes of modules.
        verbose: Log on rank 0 what is trained.
        schedule: How a batch goes through the model; at once by default.
        gradient_accumulation: Number of backward passes for each update.
        features: What `initialize` made of the config; a plain model and optimizer are boosted without parallelism.

    Raises:
        ConfigError: A value is outside its range, or model and optimizer do not belong together.
        UnsupportedError: The optimizer computes losses by itself, in a closure.

    Communication: that of `Booster.boost`, if model and optimizer are plain.

    Example:
        >>> import torch
        >>> from colossal.legacy.engine import Engine
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(2, 1)
        >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss())
        >>> losses = []
        >>> for _ in range(3):
        ...     engine.zero_grad()
        ...     loss = engine.criterion(engine(torch.ones(4, 2)), torch.ones(4, 1))
        ...     engine.backward(loss)
        ...     engine.step()
        ...     losses.append(loss.item())
        >>> losses[2] < losses[0]
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerWrapper,
        criterion: Criterion | None = None,
        gradient_handlers: Sequence[BaseGradientHandler] | None = None,
        clip_grad_norm: float = 0.0,
        ophook_list: Sequence[BaseOpHook] | None = None,
        verbose: bool = True,
        schedule: BaseSchedule | None = None,
        gradient_accumulation: int = 1,
        features: Any = None,
    ) -> None:
        superseded("colossal.engine.Engine", "Booster(plugin=...).boost(model, optimizer), booster.backward(loss, ...)")
        if not isinstance(gradient_accumulation, int) or gradient_accumulation < 1 or clip_grad_norm < 0:
            raise ConfigError(
                "Gradients are accumulated over 1 or more passes, and clipped to a norm of 0 (which does not clip) or "
                f"more. Found gradient_accumulation={gradient_accumulation!r} and clip_grad_norm={clip_grad_norm!r}."
            )
        self._features: Features = features or Features()
        _refuse_closure(optimizer)
        if not isinstance(optimizer, OptimizerWrapper):
            model, optimizer, criterion = self._features.boost(model, optimizer, criterion)
        if clip_grad_norm > 0:
            optimizer.set_max_norm(clip_grad_norm)
        note_loss_scale(optimizer)
        self._model, self._optimizer, self._criterion = model, optimizer, criterion
        self._handlers = check_handlers(gradient_handlers or ())
        self._hooks = AttachedHooks(model, ophook_list or ())
        self.verbose = verbose
        self._accumulation, self._num_passes, self._num_steps = gradient_accumulation, 0, 0
        self._has_used_grads = False
        self.schedule = schedule or NonPipelineSchedule()

    @property
    def model(self) -> nn.Module:
        """The boosted model."""
        return self._model

    @property
    def optimizer(self) -> OptimizerWrapper:
        """The boosted optimizer."""
        return self._optimizer

    @property
    def criterion(self) -> Criterion | None:
        """The loss function."""
        return self._criterion

    @property
    def schedule(self) -> BaseSchedule:
        """How a batch goes through the model; assign another one to replace it."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: BaseSchedule) -> None:
        if not isinstance(schedule, BaseSchedule):
            raise ConfigError(f"A schedule is a subclass of BaseSchedule. Found {schedule!r}. Inherit it.")
        schedule.pre_processing(self)
        self._schedule = schedule
        if isinstance(schedule, PipelineSchedule):
            self._features.stage_arguments.make = schedule.stage_arguments

    @property
    def uses_pipeline(self) -> bool:
        """Whether batches go through the stages of a pipeline."""
        return isinstance(self._schedule, PipelineSchedule)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._model.training

    @property
    def num_steps(self) -> int:
        """Number of updates."""
        return self._num_steps

    @property
    def num_waiting_passes(self) -> int:
        """Number of backward passes since the last update, whose gradients wait for more."""
        return self._num_passes

    @property
    def gradient_accumulation(self) -> int:
        """Number of backward passes for each update."""
        return self._accumulation

    def zero_grad(self) -> None:
        """Discard the gradients, unless more are still to be added to them."""
        if self._num_passes == 0 or self._num_passes >= self._accumulation:
            self._optimizer.zero_grad()
            self._num_passes, self._has_used_grads = 0, False

    def step(self) -> Any:
        """Run the gradient handlers, clip, and update, at every n-th call under accumulation.

        Returns:
            What the optimizer's step returns; None for a call that only accumulates.

        Communication: that of the handlers and of `OptimizerWrapper.step`.
        """
        result = None
        if self._num_passes >= self._accumulation or self._accumulation == 1:
            for handler in self._handlers:
                handler.handle_gradient()
            result = self._optimizer.step()
            self._num_passes, self._num_steps = 0, self._num_steps + 1
            self._has_used_grads = self._accumulation > 1
        for hook in self._hooks.hooks:
            hook.post_iter()
        return result

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss to those of the parameters.

        Args:
            loss: A scalar.

        Raises:
            ConfigError: The loss has several elements.

        Communication: that of the wrapped model, which reduces gradients.
        """
        if loss.numel() != 1:
            raise ConfigError(
                f"A backward pass begins at one number. Found a loss of shape {tuple(loss.shape)}. Take its mean: "
                "engine.backward(loss.mean()), or a criterion with reduction='mean'."
            )
        self._discard_used_grads()
        with self._reduction():
            self._optimizer.backward(loss if self._accumulation == 1 else loss / self._accumulation)
        self._num_passes += 1

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Continue a backward pass from a tensor whose gradient is known.

        Args:
            tensor: Any tensor of the graph.
            grad: Its gradient, of the same shape; as a loss it counts for 1/n under accumulation, and is multiplied by
                the loss scale.

        Communication: as in `backward`.
        """
        self._discard_used_grads()
        with self._reduction():
            grad = grad if self._accumulation == 1 else grad / self._accumulation
            self._optimizer.backward_by_grad(tensor, self._optimizer.scale_loss(grad))
        self._num_passes += 1

    def train(self) -> None:
        """Put the model into training mode."""
        self._model.train()

    def eval(self) -> None:
        """Put the model into evaluation mode."""
        self._model.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the model.

        Args:
            *args: Of the model.
            **kwargs: Of the model.

        Returns:
            What the model returns.

        Raises:
            UnsupportedError: The model is in stages of a pipeline.

        Communication: that of the wrapped model.
        """
        if self._features.uses_pipeline:
            raise UnsupportedError(
                "A pipeline runs a batch in micro-batches, which its schedule makes. Found a call of the engine. Call "
                "engine.execute_schedule(data_iter), with forward_only=True to evaluate, or train by a Trainer."
            )
        with self._reduction():
            return self._model(*args, **kwargs)

    def execute_schedule(self, data_iter: Iterator[Any], **kwargs: Any) -> tuple[Any, Any, torch.Tensor | None]:
        """Run the next batch, as the schedule says; `step` and `zero_grad` are left to the program.

        Args:
            data_iter: Yields batches.
            **kwargs: ``forward_only=False``, ``return_loss=True`` and ``return_output_label=True``.

        Returns:
            Output, label and loss; None for what was not asked for, or is on other stages of a pipeline.

        Raises:
            StopIteration: There is no batch left.

        Communication: that of the wrapped model, and of a pipeline.
        """
        output, label, loss = self._schedule.forward_backward_step(self, data_iter, **kwargs)
        return output, label, loss

    def add_hook(self, ophook: BaseOpHook) -> None:
        """Run a hook before and after the passes of modules, from here on.

        Args:
            ophook: The hook.

        Raises:
            ConfigError: It is none.
        """
        self._hooks.add(ophook)

    def remove_hook(self, ophook: BaseOpHook) -> None:
        """Run a hook no more.

        Args:
            ophook: The hook.

        Raises:
            ConfigError: The engine does not have it.
        """
        self._hooks.remove(ophook)

    def check_pipeline(self, num_microbatches: int, num_model_chunks: int) -> None:
        """Make sure that the model is in stages, and runs so many micro-batches.

        Args:
            num_microbatches: Number of micro-batches of a batch.
            num_model_chunks: Number of chunks of each rank.

        Raises:
            ConfigError: It is not, or does not.
        """
        found = self._features.num_microbatches, self._features.num_model_chunks
        if found != (num_microbatches, num_model_chunks):
            raise ConfigError(
                "A schedule of a pipeline runs the micro-batches and chunks that the model was boosted for. Found "
                f"{num_microbatches} and {num_model_chunks} in the schedule, and {found[0]} and {found[1]} in the "
                "config. Set parallel=dict(pipeline=...), NUM_MICRO_BATCHES and NUM_CHUNKS before initialize."
            )

    def run_pipeline(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        forward_only: bool,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run a batch through the stages: what `PipelineSchedule` calls.

        Args:
            data_iter: Yields batches.
            criterion: Takes outputs and the micro-batch, returns the loss.
            forward_only: Run no backward pass.
            return_loss: Return the loss, on all ranks.
            return_outputs: Return the outputs, on the last stage.

        Returns:
            As `Booster.execute_pipeline`.

        Communication: as in `Booster.execute_pipeline`.
        """
        weight = 1 if forward_only else self._accumulation

        def part(outputs: Any, batch: Any) -> torch.Tensor:
            return criterion(outputs, batch) / weight

        optimizer = None if forward_only else self._optimizer
        if not forward_only:
            self._discard_used_grads()
        with nullcontext() if forward_only else self._reduction():
            done = self._features.booster.execute_pipeline(
                data_iter, self._model, part, optimizer, return_loss, return_outputs
            )
        self._num_passes += not forward_only
        return done if done["loss"] is None else {**done, "loss": done["loss"] * weight}

    def _discard_used_grads(self) -> None:
        """Start from zero after an update, where the program did not call `zero_grad`; until then it can see them."""
        if self._has_used_grads:
            self._optimizer.zero_grad()
            self._has_used_grads = False

    def _reduction(self) -> AbstractContextManager[Any]:
        """Where the next pass belongs: gradients wait for the last one of an update, or for the handlers."""
        is_last = self._num_passes + 1 >= self._accumulation
        waits = self._features.reduces_in_handlers or not is_last
        return self._features.booster.no_sync(self._model) if waits and self._features.is_boosted else nullcontext()


def _refuse_closure(optimizer: Optimizer | OptimizerWrapper) -> None:
    """Refuse an optimizer whose step needs a closure, which `Engine.step` has none to pass."""
    kind = type(optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"An engine updates by optimizer.step(), after backward passes of its own. Found {kind.__name__}, whose "
            "step takes a closure that computes the loss. Take another optimizer, or train by Booster(plugin="
            "TorchDDPPlugin()) and optimizer.step(closure)."
        )
