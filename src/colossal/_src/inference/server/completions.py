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

    def __init__(self, service: Service, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(service)
        self._prompts = prompts
        self._echoes: Sequence[str] = ()
        self._n = body.n or 1
        self.rates_prompts = bool(body.echo) and body.logprobs is not None

    async def echo(self, prompts: Sequence[str | Sequence[int]]) -> None:
        """Let choices begin with their prompts."""
        self._echoes = await self.service.texts.decode(prompts)

    async def whole_choice(self, delta: Delta) -> dict[str, Any]:
        """Write a choice that is finished."""
        return await self.chunk_choice(delta)

    async def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """Write what is new in a choice."""
        number = delta.index // self._n
        echo = self._echoes[number] if self._echoes and delta.is_first else ""
        prompt = self._prompts[number] if self.rates_prompts and delta.is_first else ()
        return {
            "index": delta.index,
            "text": echo + delta.text,
            "logprobs": await self._logprobs(delta, number, prompt) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    async def _logprobs(self, delta: Delta, number: int, prompt: Sequence[int]) -> dict[str, Any]:
        """Write log-probabilities, behind those of the tokens of the prompt that is echoed with them."""
        entries = [*(self.prompt_logprobs[number] if prompt else ()), *delta.logprobs]
        ids = [*prompt, *(entry.token_id for entry in delta.logprobs)]
        found = await self.token_texts(entry for entry in entries if entry is not None)
        found |= await self.service.texts.token_texts(ids)
        texts = {token: each.text for token, each in found.items()}
        tokens = [texts[token] for token in ids]
        start = delta.offset + (len(self._echoes[number]) if self._echoes and not prompt else 0)
        return {
            "tokens": tokens,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [entry and {texts[each]: value for each, value in entry.top.items()} for entry in entries],
            "text_offset": [start + sum(map(len, tokens[:index])) for index in range(len(tokens))],
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
        form = CompletionForm(service, body, prompts)
        if body.echo:
            await form.echo(body.prompts)
        return await answer(request, form, body, prompts, params)

    return router
