"""When gradients are summed up: as their buckets fill, in one order on all ranks."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle

from colossal._src.tensor import grad_of
from colossal._src.zero.flat_parameters import FlatParameters
from colossal._src.zero.zero_config import ZeroConfig
from colossal.errors import UnsupportedError


@final
class Reducer:
    """Counts the gradients that are ready, and starts the reduction of each bucket that is complete.

    [Note: one order] All ranks reduce the same buckets in the same order, whichever gradients they have: a bucket waits
    for the previous one, and those that are incomplete when the backward pass ends are reduced then, with zeros for
    missing gradients. So a branch that only some ranks take changes nothing.

    [Note: in flight] Each reduction takes memory until it is over: with a budget the previous one has to end first.
    Without one, the wait is enqueued on the accelerator and does not block the host, so that the backward pass stalls
    whenever it waits for a reduction that has just begun. There several are under way: all of them where full gradients
    stay anyway, else two.
    """

    def __init__(self, config: ZeroConfig, reserve: Callable[[int], None] | None = None) -> None:
        self.enabled = True
        self._reserve = reserve
        self.num_changes = 0
        self._config = config
        self._places: dict[FlatParameters, int] = {}
        self._next = 0
        self._in_flight: deque[FlatParameters] = deque()
        self._is_watched = False  # by `backward_pass`, which ends the pass by itself
        self._is_running = False

    def watch(self, buckets: Sequence[FlatParameters]) -> list[RemovableHandle]:
        """Reduce the gradients of some more buckets, after those of the others."""
        self._places |= {bucket: len(self._places) + number for number, bucket in enumerate(buckets)}
        return [
            parameter.register_post_accumulate_grad_hook(partial(_grad_ready_hook, ref(self), ref(bucket), index))
            for bucket in buckets
            for index, parameter in enumerate(bucket.parameters)
            if parameter.requires_grad
        ]

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Run a backward pass inside; at its end all gradients are on their way, also if this rank had none."""
        outer, self._is_watched = self._is_watched, True
        self.num_changes += 1
        try:
            yield
        finally:
            self._is_watched = outer
        # a nested pass is part of the outer one: buckets that it leaves incomplete may still fill
        if not outer:
            self._end_pass()

    def finish(self, most: int = 0) -> None:
        """Wait for reductions that are under way, in the order in which they began."""
        while len(self._in_flight) > most:
            self._run(self._in_flight.popleft().finish_reduction())

    def reset(self) -> None:
        """Begin anew, as if no gradient had come since the last reduction."""
        self.finish()
        self._next, self._is_running = 0, False

    def reduce(self, buckets: Sequence[FlatParameters]) -> None:
        """Reduce buckets that hold gradients which no backward pass has reduced."""
        for bucket in buckets:
            self._start(bucket)
        self.finish()

    def on_grad_ready(self, bucket: FlatParameters, index: int, parameter: torch.Tensor) -> None:
        """Take a gradient that has just been accumulated, and start what it makes full."""
        grad = grad_of(parameter)
        if grad is not None and grad.layout != torch.strided:
            raise UnsupportedError(
                "ZeRO sums up dense gradients. Found a sparse one, of a parameter of shape "
                f"{tuple(parameter.shape)}. Build the embedding with sparse=False, or take TorchDDPPlugin."
            )
        if not self.enabled:
            self._run(bucket.keep(index))
            return
        if not (self._is_watched or self._is_running):
            self._is_running = True
            engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001 (as torch's own wrappers do)
            # a plain `loss.backward()` does not say when it ends; buckets that stay incomplete are reduced then
            engine.queue_callback(self._end_pass)
        if self._places[bucket] < self._next:
            return  # a second visit in one pass: what it brought is reduced at the step
        self._run(bucket.copy_grad(index))
        order = list(self._places)
        while self._next < len(order) and (order[self._next].is_ready or not order[self._next].trains):
            self._start_next(order)

    def _start_next(self, order: Sequence[FlatParameters]) -> None:
        bucket = order[self._next]
        self._next += 1
        if bucket.trains:
            self._start(bucket)

    def _start(self, bucket: FlatParameters) -> None:
        """Start a reduction when few enough are under way, see [Note: in flight]."""
        self.finish(self._max_in_flight(bucket))
        self._run(bucket.start_reduction())
        self.num_changes += 1
        self._in_flight.append(bucket)
        if not self._config.overlap_communication:
            self.finish()

    def _max_in_flight(self, bucket: FlatParameters) -> int:
        if bucket.device.type == "cpu" or self._reserve is not None:
            return 0
        return len(self._places) if bucket.keeps_gradients else 1

    def _run(self, work: Iterator[int]) -> None:
        """Do something that announces the bytes which it takes, and have room made for them."""
        for num_bytes in work:
            if self._reserve is not None:
                self._reserve(num_bytes)

    def _end_pass(self) -> None:
        self._is_running = False
        if self.enabled:
            order = list(self._places)
            while self._next < len(order):
                self._start_next(order)
        # all ranks begin the next pass with the same bucket
        self._next = 0
        self.finish()


def _grad_ready_hook(reducer: "ref[Reducer]", bucket: ref[FlatParameters], index: int, parameter: torch.Tensor) -> None:
    """Notify the reducer of a gradient, unless the reducer was freed.

    [Note: weak hooks] A parameter holds its hooks where the garbage collector does not look. If they held the bucket,
    which holds the parameter, neither would ever be freed.
    """
    own, its = reducer(), bucket()
    if own is not None and its is not None:
        own.on_grad_ready(its, index, parameter)
