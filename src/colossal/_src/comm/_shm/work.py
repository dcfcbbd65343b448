"""Collectives and messages that are under way, as torch.distributed hands them out."""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, final

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from colossal._src.comm._shm.engine import SharedMemoryEngine
from colossal._src.comm._shm.progress_thread import ProgressThread
from colossal.errors import CommunicationError

_Task = Callable[[], None]
_STOP_SECONDS = 1.0


class _ShmWork(Work):
    """What all of them have: a result, or the error that ended them."""

    _error: BaseException | None = None

    def __init__(self, result: Any) -> None:
        Work.__init__(self)
        self._result = result

    def result(self) -> Any:
        """Return the tensors."""
        self.wait()
        return self._result

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that ended it."""
        return self._error

    def synchronize(self) -> None:
        """Wait: there is no stream whose order could stand for that."""
        self.wait()

    def _outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class _Promise:
    """A future of torch, and the way to keep it.

    `Future.set_exception` marks a future as done, with the exception as its value, and only Python would raise it. DDP,
    which waits in C++, would take that for tensors. A callback that raises is an error for both.
    """

    def __init__(self, outcome: Callable[[], Any]) -> None:
        self._kept: Future[None] = Future()
        self.future: Future[Any] = self._kept.then(lambda _: outcome())

    def keep(self) -> None:
        """End the future, with what `outcome` returns or raises now, and run its callbacks here."""
        self._kept.set_result(None)


@final
class CompletedWork(_ShmWork):
    """A collective that was over when the call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 (torch's signature)
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True: it is over."""
        return True

    def get_future(self) -> "Future[Any]":
        """Return a future that is done."""
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


@final
class PendingWork(_ShmWork):
    """A task that a worker carries out."""

    def __init__(self, task: _Task, result: Any) -> None:
        super().__init__(result)
        self._task: _Task | None = task
        self._running = threading.Lock()
        self._running.acquire()
        self._mutex = threading.Lock()
        self._is_over = self._is_promised = False
        self._promise: _Promise | None = None

    def run(self) -> None:
        """Run the task and release the threads that wait for it; `settle` comes next."""
        try:
            assert self._task is not None
            self._task()
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            self._error = error
        self._task = None  # it holds the tensors
        with self._mutex:
            # In one step: a future that is requested meanwhile is resolved by `settle` or `get_future`, never by both.
            self._is_over, self._is_promised = True, self._promise is not None
        self._running.release()

    @property
    def has_future(self) -> bool:
        """Whether somebody asked for a future."""
        return self._promise is not None

    def settle(self) -> None:
        """Resolve the future, if one was requested before this was over, and run its callbacks here."""
        if self._is_promised:
            assert self._promise is not None
            self._promise.keep()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over, and raise the error that ended it."""
        seconds = timeout.total_seconds() if timeout else -1.0
        if not self._running.acquire(timeout=seconds if seconds > 0 else -1):
            raise RuntimeError(f"The collective must be over within {seconds:g} s. Found that it is not. Wait longer.")
        # Passed on at once: every other thread that waits needs it too.
        self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return self._is_over

    def get_future(self) -> "Future[Any]":
        """Return a future that is done when this is over."""
        with self._mutex:
            if self._promise is not None:
                return self._promise.future
            self._promise = _Promise(self._outcome)
            is_over = self._is_over
        # Outside of the lock: this runs callbacks, which may ask the same work for its future.
        if is_over:
            self._promise.keep()
        return self._promise.future


@final
class P2PWork(_ShmWork):
    """A message on its way; `hand_over` lets a worker wait for it."""

    def __init__(
        self,
        engine: SharedMemoryEngine,
        message: int,
        tensor: torch.Tensor,
        seconds: float,
        hand_over: Callable[[PendingWork], None],
    ) -> None:
        super().__init__([tensor])
        self._engine, self._message, self._seconds, self._hand_over = engine, message, seconds, hand_over
        self._source, self._is_awaited = -1, False

    def make_progress(self) -> bool:
        """Make progress, and return whether the message is under way and no caller waits for it."""
        # A thread that waits makes progress by itself.
        return not self._is_awaited and not self._engine.is_over(self._message)

    def _finish(self, seconds: float | None = None) -> None:
        try:
            self._engine.wait(self._message, self._seconds if seconds is None else seconds)
        except BaseException as error:
            self._error = error
            raise
        self._source = self._engine.source(self._message)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has arrived, or was put down for the other rank."""
        self._is_awaited = True
        self._finish(timeout.total_seconds() if timeout and timeout.total_seconds() > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Return whether it has arrived or was sent, or never will be; `exception` then has the reason."""
        if self._error is None and not self._engine.is_over(self._message):
            return False
        # It is over, so this does not wait: it records the source, or the error.
        with suppress(CommunicationError):
            self._finish()
        return True

    def get_future(self) -> "Future[Any]":
        """Return a future that is done when the message has arrived."""
        # No thread need ever wait for the message itself, so one must, for the future to be resolved.
        errand = PendingWork(self._finish, self._result)
        self._hand_over(errand)
        return errand.get_future()

    def source_rank(self) -> int:
        """Return the rank, in the group, that the message came from."""
        return self._source

    # The name by which `torch.distributed.recv` asks.
    def _source_rank(self) -> int:
        return self._source

    def __del__(self) -> None:
        """Forget the message; the engine keeps one that is under way, and its tensor."""
        self._engine.release(self._message, self._result)


@final
class TaskThread:
    """Carries out tasks in order, in a thread that starts with the first one.

    Futures are settled after that, which runs the callbacks of whoever asked for them. A callback may submit another
    task and wait for it, so another thread takes over the tasks meanwhile.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[PendingWork | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._mutex, self._baton = threading.Lock(), threading.Lock()
        self._unfinished, self._free, self._is_stopped = 0, 0, False

    @property
    def is_idle(self) -> bool:
        """Whether everything that was submitted is over."""
        return self._unfinished == 0

    def submit(self, work: PendingWork) -> None:
        """Carry out a task after all those before."""
        with self._mutex:
            # Under the lock that `stop` takes: a task after its None would never run.
            if not self._is_stopped:
                self._unfinished += 1
                if not self._threads:
                    self._start_thread()
                self._tasks.put(work)
                return
        work.run()  # which says that this rank has left the group
        work.settle()

    def _start_thread(self) -> None:
        self._free += 1
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._baton:
                work = self._tasks.get()
                if work is None:
                    self._tasks.put(None)  # for the other threads
                    return
                work.run()
                with self._mutex:
                    self._unfinished -= 1
                    self._free -= 1
                    # Callbacks belong to futures: without one, this thread is soon back.
                    if not self._free and work.has_future:
                        self._start_thread()
            work.settle()
            del work  # it may hold the group
            with self._mutex:
                self._free += 1

    def stop(self, seconds: float) -> None:
        """End the threads after the last task."""
        with self._mutex:
            self._is_stopped = True
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)


def stop(engine: SharedMemoryEngine, *workers: TaskThread | ProgressThread) -> None:
    """Leave the group, which ends the waits of its workers, and end them."""
    engine.leave()
    for worker in workers:
        worker.stop(_STOP_SECONDS)
