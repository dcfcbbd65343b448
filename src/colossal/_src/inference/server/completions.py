"""``/v1/completions``."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from colossal._src.inference.server.answers import AnswerForm, answer
from colossal._src.inference.server.deltas import Delta
from colossal._src.inference.server.protocol import CompletionBody
from colossal._src.inference.server.service import Service

_DEFAULT_TOKENS = 16  # of OpenAI


class CompletionForm(AnswerForm):
    """A text for each choice, after that of the prompt if it is to be echoed."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, echoes: Sequence[str], n: int) -> None:
        super().__init__(service)
        self._echoes = echoes
        self._n = n

    async def whole_choice(self, delta: Delta) -> dict[str, Any]:
        """Write a choice that is finished."""
        return await self.chunk_choice(delta)

    async def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """Write what is new in a choice."""
        echo = self._echoes[delta.index // self._n] if self._echoes and delta.is_first else ""
        logprobs = await self._logprobs(delta) if delta.logprobs else None
        return {
            "index": delta.index,
            "text": echo + delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    async def _logprobs(self, delta: Delta) -> dict[str, Any]:
        texts = {token: each.text for token, each in (await self.token_texts(delta)).items()}
        tokens = [texts[entry.token_id] for entry in delta.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": [{texts[token]: value for token, value in entry.top.items()} for entry in delta.logprobs],
            "text_offset": [delta.offset + sum(map(len, tokens[:index])) for index in range(len(tokens))],
        }


def completions_router(service: Service) -> APIRouter:
    """Make the route."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue one text or many."""
        service.check_model(body.model)
        limit = service.thread.engine.config.max_output_len
        max_tokens = min(_DEFAULT_TOKENS, limit) if body.max_tokens is None else body.max_tokens
        prompts = await service.texts.encode(body.prompts)
        params = body.params(max_tokens=max_tokens, logprobs=body.logprobs)
        service.check(prompts, params, prompt_field="prompt")
        echoes = await service.texts.decode(body.prompts) if body.echo else []
        return await answer(request, CompletionForm(service, echoes, params.n), body, prompts, params)

    return router
