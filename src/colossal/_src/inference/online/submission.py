"""Requests that a thread answers, and a coroutine waits for."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from colossal._src.inference.online.prompt_logprobs import PromptLogprobs
from colossal._src.inference.requests import RequestOutput
from colossal._src.inference.sampling_params import SamplingParams


class Submission:
    """Prompts that came together, and what there is of their outputs.

    An output holds all its tokens so far. So the newest one is kept, not a queue of all: a client that reads slowly
    costs no memory, and misses nothing.
    """

    def __init__(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        *,
        rates_prompts: bool = False,
        timeout_seconds: float | None = None,
        on_close: "Callable[[Submission], None]",
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.rates_prompts = rates_prompts
        self.submitted_at = time.monotonic()
        self.timeout_seconds = timeout_seconds
        self.loop = asyncio.get_running_loop()
        self.has_tokens = False  # of the thread, as the next two
        self.is_closed = False
        self.num_unfinished = len(prompts)
        self.prompt_logprobs: list[PromptLogprobs] = [()] * len(prompts)  # there before any output, if asked for
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._on_close = on_close

    async def updates(self) -> AsyncGenerator[list[RequestOutput | None], None]:
        """Yield the outputs in the order of the prompts after every change, until all are finished."""
        is_finished = False
        while not is_finished:
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error
            is_finished = self._is_finished  # those that are yielded, whatever comes meanwhile
            yield list(self._outputs)

    async def result(self) -> list[RequestOutput]:
        """Wait until all outputs are finished."""
        async for _ in self.updates():
            pass
        return [output for output in self._outputs if output is not None]

    def is_late(self, now: float) -> bool:
        """Whether its time is over."""
        return self.timeout_seconds is not None and now > self.submitted_at + self.timeout_seconds

    def close(self) -> None:
        """End what is not finished: nobody waits for it any more."""
        if not self._is_finished:
            self._on_close(self)

    def deliver_prompt(self, index: int, logprobs: PromptLogprobs) -> None:
        """In the loop: take the log-probabilities of a prompt."""
        self.prompt_logprobs[index] = logprobs

    def deliver(self, index: int, output: RequestOutput) -> None:
        """In the loop: take the newest output of a prompt."""
        self._outputs[index] = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """In the loop: raise an error where the outputs are waited for."""
        self._error = error
        self._changed.set()

    @property
    def _is_finished(self) -> bool:
        return self._error is None and all(output is not None and output.is_finished for output in self._outputs)
