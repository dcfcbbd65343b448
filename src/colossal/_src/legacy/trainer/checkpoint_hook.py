# ruff: noqa: ARG002 (a trainer passes all of them to every hook)
"""Checkpoints that a trainer writes."""

from pathlib import Path
from typing import Any

from torch import nn

from colossal._src.legacy.registry import HOOKS
from colossal._src.legacy.trainer.base_hook import BaseHook
from colossal._src.legacy.trainer.lr_scheduler_hook import LRSchedulerHook
from colossal._src.legacy.utils import save_checkpoint
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer and schedule in one file, by `save_checkpoint`.

    Args:
        interval: Number of epochs, or iterations, between two files.
        checkpoint_dir: A folder, in which a file is written for each epoch or iteration; or a path with a suffix, such
            as ``.pt``: a file that is written again each time. ``lr0.1`` is a folder: no suffix begins with a digit.
        model: The model; that of the engine by default.
        save_by_iter: Count iterations. A file from within an epoch has the number of the epoch before, -1 in the first,
            so that training goes on at the beginning of that epoch, and leaves no sample out.
        priority: Smaller ones run first.

    Raises:
        ConfigError: There is no folder, or the interval is less than 1.

    Communication: that of `save_checkpoint`.

    Example:
        >>> from colossal.legacy.trainer import SaveCheckpointHook
        >>> SaveCheckpointHook(interval=1, checkpoint_dir="./ckpt").priority
        10
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if checkpoint_dir is None or interval < 1:
            raise ConfigError(
                "Checkpoints are written into a folder, every epoch or less often. Found checkpoint_dir="
                f"{checkpoint_dir!r} and interval={interval}. Pass checkpoint_dir='./ckpt', interval=1."
            )
        self.interval, self.checkpoint_dir, self.model = interval, Path(checkpoint_dir), model
        self.save_by_iter = save_by_iter
        self._lr_scheduler: Any = None

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Show the metrics to other hooks, before the training begins.

        Args:
            trainer: The trainer that runs the hook.
        """
        for hook in trainer.hooks:
            if isinstance(hook, LRSchedulerHook):
                self._lr_scheduler = hook.lr_scheduler
        inside = self.model is not None and any(each is self.model for each in trainer.engine.model.modules())
        # a model from before initialize may be a stage, or have its gradients elsewhere: the engine knows its names
        self.model = trainer.engine.model if self.model is None or inside else self.model

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Take what an iteration of training gave.

        Args:
            trainer: The trainer that runs the hook.
            output: The output of the model; None where another stage has it.
            label: The labels; None where another stage has them.
            loss: The loss; None where another stage has it.
        """
        if self.save_by_iter and (trainer.cur_step + 1) % self.interval == 0:
            is_end = (trainer.cur_step + 1) % trainer.steps_per_epoch == 0
            self._save(trainer, f"step_{trainer.cur_step + 1}.pt", trainer.cur_epoch - (not is_end))

    def after_train_epoch(self, trainer: Any) -> None:
        """Do its work after an epoch of training.

        Args:
            trainer: The trainer that runs the hook.
        """
        if not self.save_by_iter and (trainer.cur_epoch + 1) % self.interval == 0:
            self._save(trainer, f"epoch_{trainer.cur_epoch}.pt", trainer.cur_epoch)

    def _save(self, trainer: Any, name: str, finished: int) -> None:
        assert self.model is not None
        suffix = self.checkpoint_dir.suffix[1:]
        file = self.checkpoint_dir if suffix and not suffix[0].isdigit() else self.checkpoint_dir / name
        save_checkpoint(file, finished, self.model, trainer.engine.optimizer, self._lr_scheduler)
        get_dist_logger().info(f"Saved epoch {trainer.cur_epoch} in {file}", ranks=[0])
        if waiting := trainer.engine.num_waiting_passes:
            get_dist_logger().warning(
                f"{file} was saved after {waiting} of the {trainer.engine.gradient_accumulation} backward passes of an "
                "update, whose gradients it does not have: training that goes on from it begins that update anew. "
                "Let gradient_accumulation divide the iterations between two files.",
                ranks=[0],
            )
