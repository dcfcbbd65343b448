"""The life-cycle of a trainer, as hooks override it."""

from typing import Any


class BaseHook:
    """Runs at the life-cycle of a trainer; override what is of interest.

    Hooks run in the order of their priority, the smallest first; those of one priority in the order of the list.

    Args:
        priority: The priority.

    Attributes:
        priority: As passed; 10 for a subclass that does not call this constructor.

    Example:
        >>> from colossal.legacy.trainer import BaseHook
        >>> class Report(BaseHook):
        ...     def before_train(self, trainer):
        ...         print("training starts")
        >>> Report().priority
        10
    """

    priority: int = 10

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Run when the trainer has all its hooks.

        Args:
            trainer: The trainer.
        """

    def before_train(self, trainer: Any) -> None:
        """Run before the first epoch.

        Args:
            trainer: The trainer.
        """

    def after_train(self, trainer: Any) -> None:
        """Run after the last epoch.

        Args:
            trainer: The trainer.
        """

    def before_train_iter(self, trainer: Any) -> None:
        """Run before an iteration.

        Args:
            trainer: The trainer.
        """

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Run after an iteration.

        Args:
            trainer: The trainer.
            output: Of the model; None on other stages of a pipeline than the last, or if it is not returned.
            label: Of the batch; None likewise.
            loss: The loss, a scalar.
        """

    def before_train_epoch(self, trainer: Any) -> None:
        """Run before an epoch.

        Args:
            trainer: The trainer.
        """

    def after_train_epoch(self, trainer: Any) -> None:
        """Run after an epoch.

        Args:
            trainer: The trainer.
        """

    def before_test(self, trainer: Any) -> None:
        """Run before a test.

        Args:
            trainer: The trainer.
        """

    def after_test(self, trainer: Any) -> None:
        """Run after a test.

        Args:
            trainer: The trainer.
        """

    def before_test_epoch(self, trainer: Any) -> None:
        """Run before the batches of a test.

        Args:
            trainer: The trainer.
        """

    def after_test_epoch(self, trainer: Any) -> None:
        """Run after the batches of a test.

        Args:
            trainer: The trainer.
        """

    def before_test_iter(self, trainer: Any) -> None:
        """Run before a batch of a test.

        Args:
            trainer: The trainer.
        """

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Run after a batch of a test.

        Args:
            trainer: The trainer.
            output: Of the model; None on other stages of a pipeline than the last, or if it is not returned.
            label: Of the batch; None likewise.
            loss: The loss, a scalar.
        """

    def init_runner_states(self, trainer: Any, key: str, val: Any) -> None:
        """Set an entry of `Trainer.states` if there is none.

        Args:
            trainer: The trainer.
            key: The name of the entry.
            val: Its value.
        """
        trainer.states.setdefault(key, val)
