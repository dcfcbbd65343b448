"""One thread that computes the steps of an engine, for requests from event loops."""

import threading
import time
from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

from colossal._src.inference.engine import InferenceEngine
from colossal._src.inference.online.prompt_logprobs import rate_prompt
from colossal._src.inference.online.refusals import DeadlineError, QueueFullError, UnavailableError
from colossal._src.inference.online.submission import Submission
from colossal._src.inference.requests import RequestOutput
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.statistics import EngineStatistics
from colossal.errors import CommunicationError
from colossal.logging import get_dist_logger

Prompt = str | Sequence[int]


_IDLE_SECONDS = 1.0
"""How long the ranks that follow wait for a step at most. It shows whether they are there."""


class EngineThread:
    """Runs an engine, which no other thread may call meanwhile.

    Coroutines submit requests, and wait for outputs. Commands reach the thread between two steps, so that pages of a
    request that is closed are free before the next one. An exception of a step ends the thread: what the engine holds
    then is unknown, and every request that waits has the error. So it is with a step that takes longer than
    `step_timeout_seconds`, as where a rank hangs: nothing can end the step itself.
    """

    def __init__(
        self, engine: InferenceEngine, *, max_waiting: int | None = None, step_timeout_seconds: float | None = None
    ) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self.on_first_token: Callable[[float], None] = lambda _: None
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._places: dict[int | str, tuple[Submission, int]] = {}  # by id of the engine
        self._events: dict[AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)
        self._lock = threading.Lock()  # around what decides whether a request may come
        self._open: set[Submission] = set()
        self._refusal: str | None = None
        self._failure: BaseException | None = None
        self._idle_seconds = _IDLE_SECONDS if engine.has_followers else None
        self._thread = threading.Thread(target=self._run, name="colossal-engine", daemon=True)
        self._step_timeout_seconds = step_timeout_seconds
        self._began_at: float | None = None  # what is computed now
        self._has_ended = threading.Event()

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        if self._step_timeout_seconds is not None:
            threading.Thread(target=self._watch, name="colossal-steps", daemon=True).start()
        return self

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        rates_prompts: bool = False,
        timeout_seconds: float | None = None,
    ) -> Submission:
        """Let prompts wait for the next step, all or none; in a coroutine.

        With `rates_prompts` they are tokens, which get as many log-probabilities as those of the outputs.

        Raises:
            QueueFullError: As many wait as may wait.
            UnavailableError: The engine is stopping, or has failed.
        """
        submission = Submission(
            prompts, params, rates_prompts=rates_prompts, timeout_seconds=timeout_seconds, on_close=self._close
        )
        with self._lock:
            if self._refusal is not None:
                raise UnavailableError(self._refusal)
            self._check_room(len(prompts) * params.n)
            self._open.add(submission)
            # Behind the lock: nothing is put after the end, which would wait forever.
            self._commands.put(partial(self._add, submission))
        return submission

    def drain(self) -> None:
        """Take no more requests; those that are there are finished. Called by a signal handler, it takes no lock."""
        self._refusal = self._refusal or "The server is stopping. Send the request to another one, or later."

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the thread after its step, and all requests with an error."""
        self.drain()
        self._commands.put(None)
        self._thread.join(timeout_seconds)

    def fail(self, reason: str) -> None:
        """End all requests with an error, and take no more; from any thread, while a step may wait for a lost rank."""
        get_dist_logger().error(f"No request is taken any more: {reason}")
        self._end_all(f"A step of the engine cannot end: {reason}", UnavailableError(reason))

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not self._open

    @property
    def refusal(self) -> str | None:
        """Why no request is taken, or None if they are."""
        return self._refusal

    @property
    def failure(self) -> BaseException | None:
        """What a step has raised."""
        return self._failure

    @property
    def capacity(self) -> int | None:
        """Sequences that run and wait at most; None for any number."""
        return None if self.max_waiting is None else self.engine.config.max_batch_size + self.max_waiting

    @property
    def statistics(self) -> EngineStatistics:
        """Of the engine."""
        return self.engine.statistics

    def _check_room(self, num_sequences: int) -> None:
        """Reject sequences for which there is no place in the queue."""
        capacity = self.capacity
        if capacity is None:
            return
        num_open = sum(submission.num_unfinished * submission.params.n for submission in self._open)
        if num_open + num_sequences > capacity:
            raise QueueFullError(
                f"At most {capacity} outputs run and wait. Found {num_open}, and a request for {num_sequences} more. "
                "Try again later."
            )

    # ------------------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while self._take_commands() and self._failure is None:
                self._end_late()
                self._take_outputs(self.engine.step())
                self._deliver()
        except BaseException as error:  # noqa: BLE001 (whatever it is, clients must not wait for it)
            get_dist_logger().error(f"A step of the engine has failed, and no request is taken any more: {error!r}")
            self._deliver()
            self._end_all(f"A step of the engine has failed: {error!r}. Start the server again.", error)
        else:
            self._deliver()
            self._end_all("The server has stopped. Send the request to another one, or later.")
            with suppress(CommunicationError):  # of a rank that was lost meanwhile
                if self._failure is None:
                    self.engine.close()
        finally:
            self._has_ended.set()

    def _watch(self) -> None:
        """In a thread of its own: find a step that does not end."""
        limit = self._step_timeout_seconds
        assert limit is not None
        while not self._has_ended.wait(min(limit / 4, 1.0)):
            began_at = self._began_at
            if began_at is not None and time.monotonic() - began_at > limit:
                self.fail(
                    f"A step ends within step_timeout={limit:g} s. Found one that has not: a rank hangs, or computes "
                    "more in a step than it can in this time. Look at the ranks, and start the server again, with a "
                    "larger --step_timeout for a slow one."
                )
                return

    def _take_commands(self) -> bool:
        """Do what was asked for since the last step, and wait if there is no other; False at the end."""
        while True:
            self._began_at = None
            try:
                command = self._commands.get(not self.engine.has_requests, self._idle_seconds)
            except Empty:  # or other ranks wait for a step, which has nothing to compute
                self._began_at = time.monotonic()
                return True
            if command is None:
                return False
            self._began_at = time.monotonic()
            command()
            self._deliver()  # an error, which no step would take along

    def _add(self, submission: Submission) -> None:
        for index, prompt in enumerate(submission.prompts):
            if submission.is_closed:
                return
            try:
                request_id = self.engine.add_request(prompt, submission.params)
                self._places[request_id] = submission, index
                if submission.rates_prompts:
                    assert not isinstance(prompt, str)
                    rated = rate_prompt(self.engine, prompt, submission.params.logprobs or 0)
                    self._events[submission.loop].append(partial(submission.deliver_prompt, index, rated))
            except Exception as error:  # noqa: BLE001 (of this request only)
                self._end(submission, error)

    def _close(self, submission: Submission) -> None:
        """In the loop: ask the thread to end a submission."""
        self._commands.put(partial(self._end, submission))

    def _end(self, submission: Submission, error: Exception | None = None) -> None:
        """End what is not finished of a submission, and free its pages."""
        submission.is_closed = True
        for request_id in [each for each, (owner, _) in self._places.items() if owner is submission]:
            del self._places[request_id]
            self.engine.abort(request_id)
        self._forget(submission)
        if error is not None:
            self._events[submission.loop].append(partial(submission.fail, error))

    def _end_late(self) -> None:
        now = time.monotonic()
        for submission in {each for each, _ in self._places.values() if each.is_late(now)}:
            message = (
                f"A request has {submission.timeout_seconds:g} seconds. Found one that needs more. Ask for fewer "
                "tokens, or later."
            )
            self._end(submission, DeadlineError(message))

    def _end_all(self, refusal: str, failure: BaseException | None = None) -> None:
        """In any thread: take no more requests, and end all of them with an error."""
        with self._lock:
            if self._failure is None:  # else the first reason stays: others follow from it
                self._refusal, self._failure = refusal, failure
            submissions, self._open = self._open, set()
        for submission in submissions:
            _call_in(submission.loop, [partial(submission.fail, UnavailableError(self._refusal))])

    def _forget(self, submission: Submission) -> None:
        with self._lock:
            self._open.discard(submission)

    def _take_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            submission, index = self._places[output.request_id]
            if not submission.has_tokens:
                submission.has_tokens = True
                self.on_first_token(time.monotonic() - submission.submitted_at)
            if output.is_finished:
                del self._places[output.request_id]
                submission.num_unfinished -= 1
                if not submission.num_unfinished:
                    self._forget(submission)
            self._events[submission.loop].append(partial(submission.deliver, index, output))

    def _deliver(self) -> None:
        """Wake each event loop once, with all that is new."""
        events, self._events = self._events, defaultdict(list)
        for loop, actions in events.items():
            _call_in(loop, actions)


def _call_in(loop: AbstractEventLoop, actions: Iterable[Callable[[], None]]) -> None:
    with suppress(RuntimeError):  # a loop that is closed has no client that waits
        loop.call_soon_threadsafe(_do_all, actions)


def _do_all(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()
