"""State that a function can leave in its process, where the next one would find it."""

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import distributed as dist

from colossal._src.cluster import set_ambient_mesh

_SETTLE_SECONDS = 0.5
"""Some libraries ask their threads to end and do not wait for them."""

_TASKS = Path("/proc/self/task")  # empty where there is no procfs
_NEW_LOGGER = (logging.NOTSET, (), False, True)


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # and forget which warnings have been given
    warnings.filters.extend(filters)  # type: ignore[attr-defined]


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda value: torch.set_autocast_dtype("cpu", value)),
    (torch.get_rng_state, torch.set_rng_state),
    (np.random.get_state, np.random.set_state),
    (random.getstate, random.setstate),
    (Path.cwd, os.chdir),
    (lambda: [*sys.path], lambda value: sys.path.__setitem__(slice(None), value)),
    (lambda: [*warnings.filters], _set_warning_filters),
)
"""How each setting is read, and how it is written."""

_GUARDED = ("builtins", "os", "torch", "torch.distributed", "torch.nn")
_GUARDED_PACKAGES = ("colossal.", "torch.distributed.", "torch.nn.")  # torch itself wraps what is in torch.optim


@final
class ProcessState:
    """What this process is like now, to be restored after each function that runs in it."""

    def __init__(self) -> None:
        self._settings = [read() for read, _ in _SETTINGS]
        self._environment = dict(os.environ)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._loggers = {name: _state_of(logger) for name, logger in _loggers()}
        self._threads = set(threading.enumerate())
        self._definitions: dict[Any, dict[str, Any]] = {}
        self._look_at_new_modules()
        gc.freeze()  # what is here stays; collecting what a function leaves takes milliseconds then

    def restore(self) -> list[str]:
        """Undo what the last function did."""
        if dist.is_initialized():
            dist.destroy_process_group()
        set_ambient_mesh(None)
        torch.set_default_device(None)
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():  # noqa: SLF001 (torch has no public way)
            return ["a mode of torch"]
        torch.set_printoptions(profile="default")
        torch.clear_autocast_cache()
        for (_, write), value in zip(_SETTINGS, self._settings, strict=True):
            write(value)
        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        self._restore_signals()
        self._restore_loggers()
        _forget_meshes()
        gc.collect()
        return list(self._remains())

    def _restore_signals(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def _restore_loggers(self) -> None:
        for name, logger in _loggers():
            before = self._loggers.get(name, _NEW_LOGGER)
            if _state_of(logger) != before:
                logger.level, logger.handlers, logger.disabled, logger.propagate = before[0], [*before[1]], *before[2:]
                logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # noqa: SLF001 (Python has no other way)

    def _remains(self) -> Iterator[str]:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (threads := set(threading.enumerate()) - self._threads) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield from (f"thread {thread.name}" for thread in threads)
        yield from (f"process {pid}" for path in _TASKS.glob("*/children") for pid in path.read_text().split())
        for owner, before in self._definitions.items():
            there = sys.modules.get(owner) if isinstance(owner, str) else owner
            now = before if there is None else vars(there)
            if not before.items() <= now.items():  # one by one, thousands take longer than most calls
                changed = [key for key, value in before.items() if now.get(key, value) is not value]
                yield from (f"another {key} of {owner}" for key in changed)
        self._look_at_new_modules()

    def _look_at_new_modules(self) -> None:
        """Note the functions and classes of modules that tests replace parts of, and the methods of those classes."""
        for name, module in list(sys.modules.items()):
            if name not in self._definitions and (name in _GUARDED or name.startswith(_GUARDED_PACKAGES)):
                self._definitions[name] = _callables(module)
                for kind in self._definitions[name].values():
                    if isinstance(kind, type) and kind not in self._definitions:
                        self._definitions[kind] = _callables(kind)


def _callables(owner: Any) -> dict[str, Any]:
    return {key: value for key, value in list(vars(owner).items()) if callable(value)}


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.root
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            yield name, logger


def _state_of(logger: logging.Logger) -> tuple[int, tuple[logging.Handler, ...], bool, bool]:
    return logger.level, tuple(logger.handlers), logger.disabled, logger.propagate


def _forget_meshes() -> None:
    """Clear the cache of DTensor's sharding rules: it holds meshes whose process groups are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # noqa: SLF001 (torch has no public name)
