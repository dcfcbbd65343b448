"""The application: all routes around one engine."""

import time
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colossal._src.inference.server.chats import chat_router
from colossal._src.inference.server.completions import completions_router
from colossal._src.inference.server.errors import ApiError, add_error_handlers
from colossal._src.inference.server.generation import generation_router
from colossal._src.inference.server.metrics import metrics_router
from colossal._src.inference.server.service import Service


def make_app(service: Service) -> FastAPI:
    """Make an application around an engine whose thread runs."""
    settings = service.settings
    app = FastAPI(title="colossal serve", description=f"Generation with {settings.model_name}")
    add_error_handlers(app)
    for router in (completions_router, chat_router, generation_router):
        app.include_router(router(service))
    app.include_router(metrics_router(service.thread))
    app.include_router(_state_router(service))
    app.add_middleware(_BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.allow_cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return app


def _state_router(service: Service) -> APIRouter:
    """Make the routes that say what is served, and whether it is."""
    router = APIRouter()
    model = {"id": service.settings.model_name, "object": "model", "created": int(time.time()), "owned_by": "colossal"}
    # `max_model_len` is not of OpenAI; others have it too.
    model["max_model_len"] = service.thread.engine.config.max_length

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Name the model."""
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def named_model(name: str) -> dict[str, Any]:
        """Describe the model."""
        service.check_model(name)
        return model

    @router.get("/health")
    async def health() -> JSONResponse:
        """Say whether requests are taken, and if not why."""
        refusal = service.thread.refusal
        status = "ok" if refusal is None else "failed" if service.thread.failure else "stopping"
        return JSONResponse({"status": status, "reason": refusal}, 200 if refusal is None else 503)

    return router


class _BodyLimit:
    """Rejects bodies that are too long, before they are in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error(num_bytes)
            return message

        if length.isdigit() and int(length) > self._max_bytes:
            await self._error(int(length)).response()(scope, receive, send)
        else:
            await self._app(scope, receive_limited, send)

    def _error(self, num_bytes: int) -> ApiError:
        return ApiError(413, f"A body has at most {self._max_bytes} bytes. Found at least {num_bytes}. Send less.")
