"""What all routes of a server share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from colossal._src.inference.engine import InferenceEngine
from colossal._src.inference.online import EngineThread
from colossal._src.inference.online.submission import Submission
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.server.errors import ApiError
from colossal._src.inference.server.settings import ServerSettings
from colossal._src.inference.server.texts import Texts


@dataclass(frozen=True)
class Service:
    """An engine that runs, its tokenizer, and what the server was asked for."""

    thread: EngineThread
    texts: Texts
    settings: ServerSettings

    def check_model(self, name: str | None) -> None:
        """Reject a request for another model."""
        if name not in (None, self.settings.model_name):
            message = f"This server has the model {self.settings.model_name!r}. Found {name!r}. Ask for that one."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, prompt_field: str) -> None:
        """Reject what the engine does not take, before it waits, and name its field."""
        engine, capacity = self.thread.engine, self.thread.capacity
        longest = max(map(len, prompts))
        if longest > engine.config.max_input_len:
            message = f"A prompt has at most {engine.config.max_input_len} tokens here. Found {longest}. Shorten it."
            raise ApiError(400, message, param=prompt_field, code="context_length_exceeded")
        model: Any = engine.model
        num_tokens = model.get_input_embeddings().num_embeddings
        highest = max(max(prompt, default=0) for prompt in prompts)
        if highest >= num_tokens:
            message = f"Tokens of this model are integers below {num_tokens}. Found {highest}. Use its tokenizer."
            raise ApiError(400, message, param=prompt_field)
        most = engine.config.max_output_len
        if params.max_tokens is not None and params.max_tokens > most:
            message = f"An output has at most {most} tokens here. Found {params.max_tokens}. Ask for fewer."
            raise ApiError(400, message, param="max_tokens")
        num_outputs = len(prompts) * params.n
        if capacity is not None and num_outputs > capacity:
            message = f"At most {capacity} outputs are generated at once. Found {num_outputs}. Ask for fewer."
            raise ApiError(400, message, param="n" if params.n > 1 else prompt_field)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        timeout_seconds: float | None = None,
        *,
        rates_prompts: bool = False,
    ) -> Submission:
        """Let prompts wait, not longer than the server allows."""
        most = self.settings.timeout_seconds
        seconds = min(timeout_seconds or most, most)
        return self.thread.submit(prompts, params, rates_prompts=rates_prompts, timeout_seconds=seconds)


@contextmanager
def start_service(engine: InferenceEngine, settings: ServerSettings) -> Iterator[Service]:
    """Start the threads of an engine and of its tokenizer, and end them."""
    thread = EngineThread(
        engine, max_waiting=settings.queue_size, step_timeout_seconds=settings.step_timeout_seconds
    ).start()
    texts = Texts(engine.tokenizer)
    try:
        yield Service(thread, texts, settings)
    finally:
        thread.stop()
        texts.close()
