"""What parts of the library add to the steps and backward passes of a boosted optimizer."""

from collections.abc import Callable

import torch


class HooksMixin:
    """What `OptimizerWrapper` calls at its steps, backward passes and saves."""

    def _make_hooks(self) -> None:
        self._zero_grad_hooks: list[Callable[[], None]] = []
        self._prepare_backward: list[Callable[[torch.Tensor], None]] = []
        self._step_checks: list[Callable[[], None]] = []
        self._save_checks: list[Callable[[], None]] = []
        self._explain_errors: list[Callable[[Exception], None]] = []

    def register_zero_grad_hook(self, callback: Callable[[], None]) -> None:
        """Register how to discard gradients that are not in the parameters, such as those that wait to be reduced.

        Args:
            callback: Called by `zero_grad`.
        """
        self._zero_grad_hooks.append(callback)

    def register_backward_hook(self, callback: Callable[[torch.Tensor], None]) -> None:
        """Register what a backward pass is to be prepared by.

        Args:
            callback: Called before each with a tensor that it begins with.
        """
        self._prepare_backward.append(callback)

    def register_backward_error_hook(self, callback: Callable[[Exception], None]) -> None:
        """Register what explains an error of a backward pass.

        Args:
            callback: Called with the error, to which it may add a note, or in place of which it raises another.
        """
        self._explain_errors.append(callback)

    def register_step_check(self, callback: Callable[[], None]) -> None:
        """Register what rejects a step that would be wrong.

        Args:
            callback: Called before each step, with the gradients as backward passes left them.
        """
        self._step_checks.append(callback)

    def register_save_check(self, callback: Callable[[], None]) -> None:
        """Register what rejects a checkpoint that would be wrong.

        Args:
            callback: Called before each is written.
        """
        self._save_checks.append(callback)

    def check_save(self) -> None:
        """Raise the errors of these checks; communication: theirs."""
        for check in self._save_checks:
            check()
