"""Clients that may go away before they have their answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from colossal._src.inference.server.errors import ApiError, to_api_error

_T = TypeVar("_T")
_CLOSED_REQUEST = 499  # not of the standard; logs show it, no client does


async def until_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """Do some work, and cancel it when the client goes away.

    Raises:
        ApiError: The client has gone.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(_CLOSED_REQUEST, "The client has gone.")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Objects that are sent one by one, as server-sent events, until the client goes away.

    An error on the way is the last event: the status has been sent already.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], *, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (of ASGI)
        """Send the events."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_gone(receive, self._send_all(send))
        except (ApiError, OSError):
            pass  # the client has gone
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send(send, json.dumps(event, ensure_ascii=False, separators=(",", ":")))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, the client reads it)
            await self._send(send, json.dumps(to_api_error(error).body))
        else:
            await self._send(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send(send: Send, data: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
