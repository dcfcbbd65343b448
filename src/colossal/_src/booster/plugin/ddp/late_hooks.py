"""Hooks of a program on gradients of replicas, which see averaged ones only at the end of a backward pass."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

_hooks_of: Callable[[torch.Tensor], Any] = torch.Tensor._post_accumulate_grad_hooks.__get__  # type: ignore[attr-defined]  # noqa: SLF001 (it has no public name)


@final
class LateHook:
    """Calls a post-accumulate-grad hook when all gradients of a pass are reduced.

    One that updates its parameter by what it sees would train each rank on its own samples. It keeps its place among
    the hooks of the parameter, from which the program may remove it.
    """

    def __init__(self, hook: Callable[[torch.Tensor], Any], reduces: Callable[[], bool]) -> None:
        self._hook, self._reduces = hook, reduces

    def __call__(self, parameter: torch.Tensor) -> None:
        """Call it now where nothing is reduced, as inside of `no_sync`, and else after the pass."""
        if not self._reduces():
            self._hook(parameter)
            return
        # twice: `DistributedDataParallel` queues its own end of the pass after the first of these
        _queue(lambda: _queue(lambda: self._hook(parameter)))


@final
class HookDelay:
    """Delays the hooks that a program registers on parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], reduces: Callable[[], bool]) -> None:
        self._parameters, self._reduces = parameters, reduces
        self._seen: list[int] = []  # the last hook of each parameter that has some; numbers only grow

    def update(self) -> None:
        """Delay what is new."""
        found = list(filter(None, map(_hooks_of, self._parameters)))
        if (last := list(map(next, map(reversed, found)))) == self._seen:
            return
        self._seen = last
        for hooks in found:
            for key, hook in hooks.items():
                if not isinstance(hook, LateHook) and not _is_ours(hook):
                    hooks[key] = LateHook(hook, self._reduces)  # no new key: the program removes this one by its handle


def _is_ours(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("colossal.")


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001 (as FSDP2 does)
    engine.queue_callback(callback)
