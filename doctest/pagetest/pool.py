"""The pool: runs a few pages at a time, each in a process of the harness's own, and hands the results back in order."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NoReturn

import psutil

from pagetest.limits import scaled
from pagetest.model.script import make_script
from pagetest.results.result import FAIL, Result, result_without_run
from pagetest.run.failure import Failure
from pagetest.run.runner import Runner
from pagetest.run.session import adopt_orphans
from pagetest.slots import default_num_slots, slots_needed
from pagetest.suite import Suite

STOP_SECONDS = 20.0

_PR_SET_PDEATHSIG = 1
_CONTEXT = multiprocessing.get_context("fork")

# [Note: who runs a page]
# A session takes every process below its own for one of its page's, orphans included, so two sessions at a time need
# two processes. These are forks of the harness. One that is asked to end kills its page's processes first, and further
# signals do not disturb it; when the harness itself is killed, the kernel signals its forks to end. Should one of them
# be killed, its page has failed, what it leaves comes to the harness, which kills it, and another one takes its place.
# Each is a process group of its own: Ctrl-C reaches the harness alone, which ends the others, and no page can reach
# the harness by a signal to the group of what runs it.


@dataclass
class _Worker:
    """A process that runs pages, and the cost of the one that it is at."""

    process: BaseProcess
    connection: Connection
    page: str = ""
    num_slots: int = 0


@dataclass(frozen=True)
class WorkerPool:
    """Runs pages, as many ranks at a time as there are slots."""

    suite: Suite
    runner: Runner
    num_workers: int
    # How many ranks may run at a time; a page with more, or one that asks for it, runs alone.
    slots: int = field(default_factory=default_num_slots)
    _other_children: set[psutil.Process] = field(default_factory=set)

    def start_order(self, names: Sequence[str]) -> list[str]:
        """The order in which the pages start: those that run alone, then those with fewer and fewer ranks."""
        # One at a time they start as they are given.
        return sorted(names, key=lambda name: -self.num_slots(name)) if self.num_workers > 1 else list(names)

    def num_slots(self, name: str) -> int:
        """How many slots a page takes."""
        page = self.suite.tree.page(name, self.suite.tree.languages(name)[0])
        return min(self.slots, slots_needed(page))

    def run(self, names: Sequence[str]) -> Iterator[Result]:
        """Runs the pages; the results come in the order in which the pages were started, see `start_order`."""
        waiting, ended = deque(self.start_order(names)), dict[str, list[Result]]()
        due = deque(waiting)
        with self._workers() as workers:
            while due:
                self._assign_pages(workers, waiting)
                for worker in _wait_for_workers(workers):
                    ended[worker.page] = _receive_results(worker) or self._replace_worker(worker, workers)
                    worker.page, worker.num_slots = "", 0
                while due and due[0] in ended:
                    yield from ended.pop(due.popleft())

    def _assign_pages(self, workers: Sequence[_Worker], waiting: deque[str]) -> None:
        """Gives pages to processes that have none, as long as there are slots for the next one."""
        for worker in workers:
            free = self.slots - sum(other.num_slots for other in workers)
            if waiting and not worker.page and (cost := self.num_slots(waiting[0])) <= free:
                worker.page, worker.num_slots = waiting.popleft(), cost
                worker.connection.send(worker.page)

    def _replace_worker(self, lost: _Worker, workers: list[_Worker]) -> list[Result]:
        """Puts another process in the place of one that is gone; what it left is killed, and its page has failed."""
        lost.process.join()
        workers.remove(lost)
        known = {worker.process.pid for worker in workers}
        for left in psutil.Process().children():
            if left.pid not in known and left not in self._other_children:
                for process in (left, *left.children(recursive=True)):
                    with suppress(psutil.Error):
                        process.kill()
        workers.append(self._fork_worker(workers))
        end = f"the process that ran this page ended with {lost.process.exitcode}"
        tree = self.suite.tree
        pages = [tree.page(lost.page, each) for each in tree.languages(lost.page) if each in self.suite.languages]
        failures = [Failure(page.command_line, f"{end}: a page must not signal what runs it") for page in pages]
        results = [result_without_run(page, make_script(page), FAIL) for page in pages]
        return [replace(result, failure=failure) for result, failure in zip(results, failures, strict=True)]

    @contextmanager
    def _workers(self) -> Iterator[list[_Worker]]:
        adopt_orphans()
        self._other_children.update(psutil.Process().children(recursive=True))
        workers: list[_Worker] = []
        try:
            for _ in range(self.num_workers):
                workers.append(self._fork_worker(workers))
            yield workers
        finally:
            for worker in workers:
                worker.process.terminate()
            for worker in workers:
                worker.process.join(scaled(STOP_SECONDS))
            for left in set(psutil.Process().children(recursive=True)) - self._other_children:
                with suppress(psutil.Error):
                    left.kill()
            for worker in workers:
                worker.process.join()

    def _fork_worker(self, others: Sequence[_Worker]) -> _Worker:
        ours, theirs = _CONTEXT.Pipe()
        links = [ours, *(other.connection for other in others)]
        process = _CONTEXT.Process(target=self._worker_main, args=(theirs, links, os.getpid()))
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _worker_main(self, link: Connection, foreign: Sequence[Connection], parent: int) -> None:
        """What a process of the pool does until it is asked to end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt_once)
        os.setpgid(0, 0)
        _exit_with_parent(parent)
        for other in foreign:
            other.close()  # else no end of a link would ever be seen as closed
        with suppress(EOFError, KeyboardInterrupt):
            while True:
                link.send(list(self.suite.run([link.recv()], self.runner)))


def _wait_for_workers(workers: Sequence[_Worker]) -> list[_Worker]:
    """The processes that have ended their page, or have ended themselves."""
    busy = [worker for worker in workers if worker.page]
    links = wait([worker.connection for worker in busy])
    return [worker for worker in busy if worker.connection in links]


def _receive_results(worker: _Worker) -> list[Result]:
    """The results of a page; none if the process that ran it is gone."""
    with suppress(EOFError, ConnectionResetError):
        return worker.connection.recv()
    return []


def _interrupt_once(_number: int, _frame: object) -> NoReturn:
    """Ends this process once: what it does then must not be disturbed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _exit_with_parent(parent: int) -> None:
    """Makes the kernel end this process with its parent, which may have gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise KeyboardInterrupt
