"""Answers of the API of OpenAI: whole ones, and streams of what is new."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from colossal._src.inference.online.prompt_logprobs import PromptLogprobs
from colossal._src.inference.requests import RequestOutput, TokenLogprob
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.server.clients import EventStream, until_gone
from colossal._src.inference.server.deltas import Delta, DeltaReader
from colossal._src.inference.server.protocol import GenerationBody
from colossal._src.inference.server.service import Service
from colossal._src.inference.server.texts import TokenText

Outputs = Sequence[RequestOutput | None]


class AnswerForm(ABC):
    """How the choices of an answer are written. A whole answer is one where everything is new."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, service: Service) -> None:
        self.service = service
        self.rates_prompts = False
        self.prompt_logprobs: Sequence[PromptLogprobs] = ()

    @abstractmethod
    async def whole_choice(self, delta: Delta) -> dict[str, Any]:
        """Write a choice that is finished."""

    @abstractmethod
    async def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """Write what is new in a choice."""

    async def token_texts(self, logprobs: Iterable[TokenLogprob]) -> dict[int, TokenText]:
        """The texts of all tokens that have log-probabilities."""
        return await self.service.texts.token_texts(
            token for entry in logprobs for token in (entry.token_id, *entry.top)
        )


async def answer(
    request: Request,
    form: AnswerForm,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> Response:
    """Generate for a request as long as its client is there."""
    submission = form.service.submit(prompts, params, body.timeout_seconds, rates_prompts=form.rates_prompts)
    form.prompt_logprobs = submission.prompt_logprobs
    head = {"id": f"{form.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
    head["model"] = form.service.settings.model_name
    try:
        if not body.stream:
            outputs = await until_gone(request.receive, submission.result())
            choices = [await form.whole_choice(delta) for delta in DeltaReader(params.n).read(outputs)]
            return JSONResponse(head | {"object": form.whole_object, "choices": choices, "usage": _usage(outputs)})
        # An error that comes before the first token still has a status.
        updates = submission.updates()
        first = await until_gone(request.receive, anext(updates))
    except BaseException:
        submission.close()
        raise
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _events(form, head, _chained(first, updates), DeltaReader(params.n), has_usage=has_usage)
    return EventStream(events, on_end=submission.close)


async def _events(
    form: AnswerForm,
    head: dict[str, Any],
    updates: AsyncIterator[Outputs],
    reader: DeltaReader,
    *,
    has_usage: bool,
) -> AsyncIterator[dict[str, Any]]:
    """Yield a chunk for each choice that has something new, and the usage if it was asked for."""
    chunk = head | {"object": form.chunk_object} | ({"usage": None} if has_usage else {})
    outputs: Outputs = ()
    async for outputs in updates:
        for delta in reader.read(outputs):
            yield chunk | {"choices": [await form.chunk_choice(delta)]}
    if has_usage:
        yield chunk | {"choices": [], "usage": _usage(outputs)}


async def _chained(first: Outputs, rest: AsyncIterator[Outputs]) -> AsyncIterator[Outputs]:
    yield first
    async for each in rest:
        yield each


def _usage(outputs: Outputs) -> dict[str, int]:
    there = [output for output in outputs if output is not None]
    prompt = sum(len(output.prompt_token_ids) for output in there)
    completion = sum(len(choice.token_ids) for output in there for choice in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
