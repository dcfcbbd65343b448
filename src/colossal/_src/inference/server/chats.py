"""``/v1/chat/completions``."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from colossal._src.inference.server.answers import AnswerForm, answer
from colossal._src.inference.server.deltas import Delta
from colossal._src.inference.server.protocol import ChatBody
from colossal._src.inference.server.service import Service
from colossal._src.inference.server.texts import TokenText


class ChatForm(AnswerForm):
    """A message for each choice."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    async def whole_choice(self, delta: Delta) -> dict[str, Any]:
        """Write a choice that is finished."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": await self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    async def chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """Write what is new in a choice."""
        role = {"role": "assistant"} if delta.is_first else {}
        return {
            "index": delta.index,
            "delta": role | ({"content": delta.text} if delta.text or role else {}),
            "logprobs": await self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    async def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        texts = await self.token_texts(delta.logprobs)
        content = [
            _token(texts, entry.token_id, entry.logprob)
            | {"top_logprobs": [_token(texts, token, value) for token, value in entry.top.items()]}
            for entry in delta.logprobs
        ]
        return {"content": content, "refusal": None}


def _token(texts: Mapping[int, TokenText], token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts[token].text, "logprob": logprob, "bytes": texts[token].raw}


def chat_router(service: Service) -> APIRouter:
    """Make the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer the last message of a chat."""
        service.check_model(body.model)
        max_tokens = body.max_completion_tokens or body.max_tokens
        names = [{} if message.name is None else {"name": message.name} for message in body.messages]
        messages = [
            {"role": message.role, "content": message.text} | name
            for message, name in zip(body.messages, names, strict=True)
        ]
        prompts = [await service.texts.chat(messages)]
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.params(max_tokens=max_tokens, logprobs=logprobs)
        service.check(prompts, params, prompt_field="messages")
        return await answer(request, ChatForm(service), body, prompts, params)

    return router
