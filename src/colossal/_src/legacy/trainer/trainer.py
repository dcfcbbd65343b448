"""Epochs of training and tests by an engine, with hooks around them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.comm import gather_objects
from colossal._src.legacy.engine import BaseSchedule, Engine
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.trainer.base_hook import BaseHook
from colossal._src.legacy.trainer.metrics import Metric
from colossal._src.legacy.utils import MultiTimer
from colossal._src.legacy.utils.parallel_state import is_logging_rank
from colossal.errors import ConfigError, UnsupportedError
from colossal.logging import get_dist_logger


@final
class Trainer:
    """Runs epochs of training and tests by an engine, with hooks around them.

    Args:
        engine: What `initialize` returned.
        timer: Measures ``Train-epoch``, ``Train-step``, ``Test-epoch`` and ``Test-step``; off by default.
        logger: Its `info` is called with each phase.
        schedule: Takes the place of that of the engine.

    Attributes:
        hooks: Those of the last `fit` or `evaluate`, in the order in which they run.
        states: What hooks keep: ``metrics`` and ``step_metrics``, and entries of the program's own.

    Raises:
        ConfigError: The engine is none.

    Example:
        >>> import torch
        >>> from colossal.legacy import initialize
        >>> from colossal.legacy.trainer import LossHook, Trainer
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> engine, *_ = initialize(model, optimizer, torch.nn.MSELoss(), verbose=False)
        >>> trainer = Trainer(engine)
        >>> trainer.fit([(torch.ones(4, 2), torch.ones(4, 1))] * 3, epochs=2, hooks=[LossHook()])
        >>> trainer.cur_epoch, trainer.cur_step, list(trainer.states["metrics"]["train"])
        (2, 6, ['Loss'])
    """

    def __init__(
        self,
        engine: Engine,
        timer: MultiTimer | None = None,
        logger: Any = None,
        schedule: BaseSchedule | None = None,
    ) -> None:
        superseded("colossal.trainer.Trainer", "a loop of booster.backward(loss, optimizer) and optimizer.step()")
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"A trainer runs an engine. Found {type(engine).__name__}. Pass what initialize returned."
            )
        if schedule is not None:
            engine.schedule = schedule
        self._engine, self._logger = engine, logger
        self._timer = timer or MultiTimer(on=False)
        self._cur_epoch, self._cur_step, self._steps_per_epoch = 0, 0, 0
        self._max_steps: int | None = None
        self._is_resumed = False
        self.hooks: list[BaseHook] = []
        self.states: dict[str, Any] = {}

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    @property
    def timer(self) -> MultiTimer:
        """The timers of epochs and iterations."""
        return self._timer

    @property
    def cur_epoch(self) -> int:
        """The epoch that runs, from 0; after training the number of epochs. Set it to go on from a checkpoint."""
        return self._cur_epoch

    @cur_epoch.setter
    def cur_epoch(self, epoch: int) -> None:
        if epoch < 0:
            raise ConfigError(f"Epochs are counted from 0. Found {epoch}. Set what load_checkpoint returned, plus 1.")
        self._cur_epoch, self._is_resumed = epoch, True

    @property
    def cur_step(self) -> int:
        """The iteration that runs, from 0, counted over all epochs."""
        return self._cur_step

    @property
    def steps_per_epoch(self) -> int:
        """Number of iterations of an epoch."""
        return self._steps_per_epoch

    @property
    def max_steps(self) -> int | None:
        """Number of iterations after which training ends; None for that of the epochs."""
        return self._max_steps

    def metrics(self, kind: str) -> dict[str, Metric]:
        """Return what hooks keep of training or tests.

        Args:
            kind: ``"train"`` or ``"test"``.

        Returns:
            The metrics by their names.
        """
        return self.states.get("metrics", {}).get(kind, {})

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train, and test in between.

        A sampler that has `set_epoch` is told the epoch before each one, so that training which goes on from a
        checkpoint sees the samples in the order that it would have seen without the interruption.

        Args:
            train_dataloader: Yields batches, and has a length.
            epochs: Number of epochs; those before `cur_epoch` are left out.
            max_steps: Number of iterations after which to end.
            test_dataloader: Yields batches of tests, and has a length; without one there are no tests.
            test_interval: Number of epochs between two tests.
            hooks: Run around iterations and epochs.
            display_progress: Show a progress bar, on one rank.
            return_output_label: Give hooks the outputs and labels; without, they are not kept in memory.

        Raises:
            ConfigError: A value is outside its range, or a hook is none; or a loader is empty, ends before its length,
                or has another one on other ranks.
            UnsupportedError: There is a progress bar to show, and tqdm is not installed.

        Communication: that of the engine and the hooks.
        """
        if epochs < 1 or test_interval < 1 or (max_steps is not None and max_steps < 1):
            raise ConfigError(
                "Training takes an epoch or more, with a test every epoch or less often. Found "
                f"epochs={epochs}, max_steps={max_steps} and test_interval={test_interval}. Pass numbers from 1 on."
            )
        self._steps_per_epoch, self._max_steps = _length_of(train_dataloader), max_steps
        _check_lengths(self._steps_per_epoch, "train_dataloader", are_equal=True)
        if test_dataloader is not None:
            _check_lengths(_length_of(test_dataloader), "test_dataloader")
        self._attach(hooks)
        self._say(f"Training begins at epoch {self._cur_epoch} of {epochs}")
        self._engine.train()
        self._call_hooks("before_train")
        self._cur_step = self._cur_epoch * self._steps_per_epoch
        if self._cur_epoch >= epochs:
            get_dist_logger().warning(
                f"Nothing is trained: epochs counts those before cur_epoch too. Found cur_epoch={self._cur_epoch} and "
                f"epochs={epochs}. Pass epochs={self._cur_epoch + epochs} for {epochs} more, or set trainer.cur_epoch.",
                ranks=[0],
            )
        sampler, ahead = self._sampler_of(train_dataloader)
        for epoch in range(self._cur_epoch, epochs):
            if sampler is not None:
                sampler.set_epoch(epoch + ahead)
            self._train_epoch(train_dataloader, epoch, display_progress, return_output_label)
            if test_dataloader is not None and epoch % test_interval == 0:
                self._test(test_dataloader, epoch, display_progress, return_output_label)
            self._cur_epoch += 1
            if self._is_over():
                self._say(f"Training ends after max_steps={max_steps} iterations")
                break
        self._call_hooks("after_train")
        self._timer.reset()

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Test.

        Args:
            test_dataloader: Yields batches, and has a length.
            hooks: Run around iterations.
            display_progress: Show a progress bar, on one rank.
            return_output_label: Give hooks the outputs and labels.

        Raises:
            ConfigError: A hook is none; or the loader is empty on all ranks, or ends before its length.
            UnsupportedError: There is a progress bar to show, and tqdm is not installed.

        Communication: that of the engine and the hooks.
        """
        _check_lengths(_length_of(test_dataloader), "test_dataloader")
        self._attach(hooks)
        self._test(test_dataloader, None, display_progress, return_output_label)

    def predict(self, data: Any) -> Any:
        """Compute the outputs for data without labels.

        Args:
            data: What the model takes: a tensor, (samples, ...), or several.

        Returns:
            The outputs; None on other stages of a pipeline than the last.

        Communication: that of the engine.
        """
        self._engine.eval()
        with torch.no_grad():
            options = {"forward_only": True, "return_loss": False, "return_output_label": True}
            output, _, _ = self._engine.execute_schedule(iter([(data, None)]), **options)
        return output

    def _sampler_of(self, dataloader: Any) -> tuple[Any, int]:
        """The sampler that is told epochs, and by how many it is ahead. Communication: all_gather_object, all ranks."""
        sampler = getattr(dataloader, "sampler", None)
        is_resumed, self._is_resumed = self._is_resumed, False
        if not hasattr(sampler, "set_epoch"):
            return None, 0
        # an earlier trainer may have run epochs of it, and a program may have opened it on some ranks only
        begun: int = getattr(sampler, "epoch", 0)
        begun = max(gather_objects(begun, purpose="starts training")) if dist.is_initialized() else begun
        return sampler, 0 if is_resumed else max(0, begun - self._cur_epoch)

    def _run_batch(self, data_iter: Iterator[Any], number: int, **options: Any) -> tuple[Any, Any, Any]:
        """Run the next batch."""
        try:
            return self._engine.execute_schedule(data_iter, **options)
        except StopIteration as error:
            raise ConfigError(
                f"A loader yields as many batches as its length. Found one that has the length {number}, and ended "
                "before. Correct its __len__."
            ) from error

    def _attach(self, hooks: Sequence[BaseHook] | None) -> None:
        for hook in hooks or ():
            if not isinstance(hook, BaseHook):
                raise ConfigError(
                    f"A hook of a trainer is a subclass of BaseHook. Found {hook!r}. Inherit hooks.BaseHook."
                )
        self.states = {}
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        self._call_hooks("after_hook_is_attached")

    def _call_hooks(self, method: str, results: tuple[Any, Any, Any] | None = None) -> None:
        for hook in self.hooks:
            getattr(hook, method)(self, *(results or ()))

    def _train_epoch(
        self, dataloader: Iterable[Any], epoch: int, display_progress: bool, return_output_label: bool
    ) -> None:
        self._engine.train()
        data_iter = iter(dataloader)
        self._call_hooks("before_train_epoch")
        self._timer.start("Train-epoch")
        with closing(_progress(self._steps_per_epoch, f"[Epoch {epoch} / Train]", display_progress)) as bar:
            for _ in range(self._steps_per_epoch):
                self._call_hooks("before_train_iter")
                self._timer.start("Train-step")
                self._engine.zero_grad()
                results = self._run_batch(data_iter, self._steps_per_epoch, return_output_label=return_output_label)
                self._engine.step()
                self._timer.stop("Train-step", keep_in_history=True)
                self._call_hooks("after_train_iter", results)
                self._cur_step += 1
                bar.advance(self.states)
                if self._is_over():
                    break
        self._timer.stop("Train-epoch", keep_in_history=True)
        self._call_hooks("after_train_epoch")
        self._reset_timer("Train-step")

    def _test(
        self, dataloader: Iterable[Any], epoch: int | None, display_progress: bool, return_output_label: bool
    ) -> None:
        self._engine.eval()
        data_iter, number = iter(dataloader), _length_of(dataloader)
        self._call_hooks("before_test")
        self._call_hooks("before_test_epoch")
        self._timer.start("Test-epoch")
        name = "[Test]" if epoch is None else f"[Epoch {epoch} / Test]"
        with torch.no_grad(), closing(_progress(number, name, display_progress)) as bar:
            for _ in range(number):
                self._call_hooks("before_test_iter")
                self._timer.start("Test-step")
                results = self._run_batch(data_iter, number, forward_only=True, return_output_label=return_output_label)
                self._timer.stop("Test-step", keep_in_history=True)
                self._call_hooks("after_test_iter", results)
                bar.advance(self.states)
        self._timer.stop("Test-epoch", keep_in_history=True)
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")
        self._reset_timer("Test-step")

    def _reset_timer(self, name: str) -> None:
        if self._timer.is_on():
            self._timer.reset(name)

    def _is_over(self) -> bool:
        return self._max_steps is not None and self._cur_step >= self._max_steps

    def _say(self, text: str) -> None:
        if self._logger is not None:
            self._logger.info(text, ranks=[0])


class _Bar:
    """A progress bar of tqdm, or none."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, states: dict[str, Any]) -> None:
        if self._bar is not None:
            if "step_metrics" in states:
                self._bar.set_postfix(**states["step_metrics"])
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _progress(number: int, name: str, display: bool) -> _Bar:
    if not display or not is_logging_rank():
        return _Bar(None)
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "A progress bar is drawn by the package tqdm. Found that it is not installed. Run: pip install tqdm, or "
            "pass display_progress=False."
        ) from error
    return _Bar(tqdm(total=number, desc=name))


def _length_of(dataloader: Any) -> int:
    try:
        return len(dataloader)
    except TypeError as error:
        raise ConfigError(
            f"A trainer takes loaders that have a length. Found a {type(dataloader).__name__}. Train by the engine: "
            "for batch in loader: engine.execute_schedule(iter([batch])), engine.step()."
        ) from error


def _check_lengths(length: int, name: str, *, are_equal: bool = False) -> None:
    """Refuse loaders without batches, or for which ranks would wait. Communication: all_gather_object, all ranks."""
    lengths = gather_objects(length, purpose="starts a trainer") if dist.is_initialized() else [length]
    if not any(lengths):
        raise ConfigError(
            f"A trainer takes loaders with a batch or more. Found none in the {name}. Take smaller batches, or leave "
            "drop_last=True out."
        )
    if are_equal and len(set(lengths)) > 1:
        raise ConfigError(
            f"All ranks train the same number of batches, as they average gradients in each. Found {lengths} in the "
            f"{name}s of ranks 0 to {len(lengths) - 1}. Make it by get_dataloader on all of them."
        )
