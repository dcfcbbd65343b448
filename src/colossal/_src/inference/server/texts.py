"""The tokenizer of a server: a copy of its own, in a thread of its own."""

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from colossal.errors import ConfigError

_T = TypeVar("_T")
_REPLACEMENT = "\ufffd"


class TokenText(NamedTuple):
    """A token alone: its text and bytes, or its name in the vocabulary if it is no text."""

    text: str
    raw: list[int] | None


class Texts:
    """Turns texts into tokens and back without blocking the event loop.

    Tokenizers may not be called by two threads at once, and the engine calls its own: so this one is a copy.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._worker = ThreadPoolExecutor(1, "colossal-tokenizer")

    async def encode(self, prompts: Iterable[str | Sequence[int]]) -> list[Sequence[int]]:
        """Turn prompts into tokens, unless they are tokens already."""

        def encode_all() -> list[Sequence[int]]:
            return [self._need()(each)["input_ids"] if isinstance(each, str) else each for each in prompts]

        return await self._run(encode_all)

    async def decode(self, prompts: Iterable[str | Sequence[int]]) -> list[str]:
        """Turn prompts into texts, unless they are texts already."""
        return await self._run(
            lambda: [each if isinstance(each, str) else self._need().decode(each) for each in prompts]
        )

    async def token_texts(self, tokens: Iterable[int]) -> dict[int, TokenText]:
        """The text of each token alone."""

        def text_of(token: int) -> TokenText:
            if self._tokenizer is None:
                return TokenText(f"token_id:{token}", None)
            text = self._tokenizer.decode([token])
            if _REPLACEMENT in text:  # a part of a character
                return TokenText(self._tokenizer.convert_ids_to_tokens(token), None)
            return TokenText(text, list(text.encode()))

        return await self._run(lambda: {token: text_of(token) for token in set(tokens)})

    async def chat(self, messages: Sequence[dict[str, str]]) -> Sequence[int]:
        """Turn a chat into the tokens before its next answer.

        Raises:
            ConfigError: The tokenizer has no template, or it does not take these messages.
        """
        if getattr(self._need(), "chat_template", None) is None:
            raise ConfigError(
                "A chat becomes a prompt by the chat template of the tokenizer. Found a tokenizer without one. Ask "
                "/v1/completions, or serve a model that was trained on chats."
            )

        def render() -> Sequence[int]:
            from jinja2 import TemplateError

            try:
                return self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
                )
            except TemplateError as error:
                raise ConfigError(
                    f"The chat template of the model decides which messages there may be. It says: {error}. Send "
                    "other messages."
                ) from error

        return await self._run(render)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    def _need(self) -> Any:
        if self._tokenizer is None:
            raise ConfigError(
                "A model without a tokenizer takes tokens and returns none of its outputs as text. Found a request "
                "that needs texts. Serve the model with a tokenizer."
            )
        return self._tokenizer

    async def _run(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)
