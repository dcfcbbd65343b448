"""What a process of a test's world does: it carries out tasks, one after the other, and reports their results."""

import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.cluster import WorldSpec, form_world, wait_for_all
from colossal._src.testing.process_state import ProcessState
from colossal._src.testing.tensor_pickle import dumps


@final
@dataclass(frozen=True)
class Task:
    """What one process is asked to do."""

    rank: int
    size: int
    form: bool
    folder: str
    file: str
    module: str
    qualname: str
    environment: Mapping[str, str]
    arguments: bytes
    timeout_seconds: float
    is_last: bool

    @property
    def stack_file(self) -> Path:
        return Path(self.folder, f"stack-{self.rank}")


def serve(orders: "connection.Connection[Any, Any]", replies: "connection.Connection[Any, Any]") -> None:
    """Carry out tasks as long as there are any."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    state: ProcessState | None = None
    with suppress(EOFError):  # no more orders
        while True:
            order: Task = orders.recv()
            if not order.is_last:
                state = state or ProcessState()
            _carry_out(order, replies, state)


def _carry_out(order: Task, replies: "connection.Connection[Any, Any]", state: ProcessState | None) -> None:
    os.environ.update(order.environment)
    with order.stack_file.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        loaded = set(sys.modules)
        try:
            # pickled inside, as a result that cannot be pickled is an error of this rank
            reply, succeeded = dumps(_call(order)), True
        except BaseException:  # noqa: BLE001 (reported by the caller's process)
            reply, succeeded = traceback.format_exc(), False
        remains: list[str] = []
        if state is not None and succeeded:
            if order.module not in loaded:
                sys.modules.pop(order.module, None)
            remains = state.restore()
        replies.send_bytes(pickle.dumps((succeeded, reply, remains)))
        faulthandler.unregister(signal.SIGUSR1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(order: Task) -> Any:
    function = reduce(getattr, order.qualname.split("."), _load(order.file, order.module))
    args, kwargs = pickle.loads(order.arguments)  # noqa: S301 (from our own parent)
    if order.form:
        store = dist.FileStore(str(Path(order.folder, "store")), order.size)
        world = WorldSpec(store, order.rank, order.size, order.timeout_seconds)
        form_world(world, os.environ.get("COLOSSAL_BACKEND"))
        wait_for_all(world)  # a function that does nothing must not end before the others are connected
    return function(*args, **kwargs)


def _load(file: str, module: str) -> Any:
    """Import the function's module from its file: test files need not be importable by name."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        for parent in accumulate(module.split(".")[:-1], "{}.{}".format):
            sys.modules.setdefault(parent, ModuleType(parent))
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]
