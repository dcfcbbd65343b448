"""Runs a server until it is stopped."""

from collections.abc import Callable
from types import FrameType

import uvicorn

from colossal._src.inference.engine import InferenceEngine
from colossal._src.inference.online import EngineThread
from colossal._src.inference.server.app import make_app
from colossal._src.inference.server.service import start_service
from colossal._src.inference.server.settings import ServerSettings


def run_server(
    engine: InferenceEngine,
    settings: ServerSettings,
    *,
    watch: Callable[[Callable[[str], None]], None] | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT, and finish what runs then; return whether all steps have worked.

    `watch` is given what is to be called, from any thread, when a rank is lost.
    """
    with start_service(engine, settings) as service:
        if watch is not None:
            watch(service.thread.fail)
        config = uvicorn.Config(
            make_app(service),
            settings.host,
            settings.port,
            log_level=settings.log_level,
            timeout_graceful_shutdown=5,  # for what is left when the time of running requests is over
        )
        _Server(config, service.thread, settings.grace_seconds).run()
        return service.thread.failure is None


_TICKS_PER_SECOND = 10  # of uvicorn
_TICKS_OF_AN_ERROR = 20


class _Server(uvicorn.Server):
    """Refuses new requests after the first signal, and ends when those that run are finished, or their time is over.

    Meanwhile it listens: who asks reads that the server is stopping, and `/health` says so.
    """

    def __init__(self, config: uvicorn.Config, thread: EngineThread, grace_seconds: float) -> None:
        super().__init__(config)
        self._engine_thread = thread
        self._ticks_left = max(int(grace_seconds * _TICKS_PER_SECOND), 1)
        self._is_stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; the second signal does not wait."""
        if self._is_stopping:
            super().handle_exit(sig, frame)
        self._is_stopping = True
        self._engine_thread.drain()

    async def on_tick(self, counter: int) -> bool:
        """Find out whether it is time to end."""
        if self._is_stopping:
            self._ticks_left -= 1
            if self._ticks_left == 0:
                self._engine_thread.stop(timeout_seconds=0)  # those that still wait have an error, and read it
            is_idle = self._engine_thread.is_idle and not self.server_state.tasks
            self.should_exit = self.should_exit or is_idle or self._ticks_left < -_TICKS_OF_AN_ERROR
        return await super().on_tick(counter)
