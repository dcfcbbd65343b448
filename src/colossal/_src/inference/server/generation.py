"""``/generation``, the route of the documented OPT service."""

import random
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from colossal._src.inference.online import ListCache, MissCacheError
from colossal._src.inference.online.refusals import QueueFullError
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.server.clients import until_gone
from colossal._src.inference.server.errors import ApiError
from colossal._src.inference.server.service import Service

_QUEUE_FULL = 406  # as documented; the other routes answer 429


class GenerationTask(BaseModel):
    """A query; without `top_k`, `top_p` and `temperature` tokens are sampled as the model gives them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, examples=["Question: Where were the 2004 Olympics held?\nAnswer:"])]
    max_tokens: Annotated[int, Field(gt=0, le=256, examples=[64])]
    top_k: Annotated[int, Field(gt=0, examples=[50])] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, examples=[0.5])] | None = None
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False, examples=[0.7])] | None = None


def generation_router(service: Service) -> APIRouter:
    """Make the route, with a cache of results if there is to be one."""
    router = APIRouter()
    settings = service.settings
    cache = ListCache(settings.cache_size, settings.cache_list_size) if settings.cache_size else None

    @router.post("/generation")
    async def generate(body: GenerationTask, request: Request) -> dict[str, Any]:
        """Continue a text; the answer begins with it."""
        # The documented key is prompt and max_tokens; the same query with another temperature is another query.
        key = (body.prompt, body.max_tokens, body.top_k, body.top_p, body.temperature)
        if cache is not None:
            try:
                return {"text": random.choice(cache.get(key))}  # noqa: S311 (no secret)
            except MissCacheError:
                pass
        prompts = await service.texts.encode([body.prompt])
        names = ("top_k", "top_p", "temperature")
        given = {name: value for name in names if (value := getattr(body, name)) is not None}
        params = SamplingParams(max_tokens=body.max_tokens, **given)
        service.check(prompts, params, prompt_field="prompt")
        try:
            submission = service.submit(prompts, params)
        except QueueFullError as error:
            raise ApiError(_QUEUE_FULL, str(error)) from error
        try:
            [output] = await until_gone(request.receive, submission.result())
        finally:
            submission.close()
        text = body.prompt + output.outputs[0].text
        if cache is not None:
            cache.add(key, text)
        return {"text": text}

    return router
