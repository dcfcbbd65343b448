"""Requests, from the prompts and parameters that a program passes."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, final

from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.model_facts import end_tokens_of
from colossal._src.inference.requests import Sequence
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.text import TextStream
from colossal.errors import ConfigError

Prompt = str | Items[int]
"""A text, or its tokens."""


@dataclass(frozen=True)
class Request:
    """A prompt, and the sequences that answer it, each with its text."""

    prompt: str | None
    sequences: Mapping[Sequence, TextStream]


@final
class RequestBuilder:
    """Makes requests that fit an engine, and rejects others before anything is added."""

    def __init__(self, config: InferenceConfig, model: Any, tokenizer: Any) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._end_tokens = end_tokens_of(model, tokenizer)

    def __call__(self, prompt: Prompt, generation_config: Any) -> Request:
        """Check a request, and make its sequences."""
        params = self._parameters(generation_config)
        tokens = self._tokenize(prompt)
        if not 1 <= len(tokens) <= self._config.max_input_len:
            raise ConfigError(
                f"A prompt has 1 to max_input_len={self._config.max_input_len} tokens. Found {len(tokens)}. Shorten "
                "it, or raise max_input_len of the InferenceConfig."
            )
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_tokens)}
        sequences = [
            Sequence(tokens, params, params.max_tokens or self._config.max_output_len, frozenset(ends), index)
            for index in range(params.n)
        ]
        for sequence in sequences[1:]:
            sequence.leader = sequences[0]
        streams = {sequence: TextStream(self._tokenizer, params.stop) for sequence in sequences}
        return Request(prompt if isinstance(prompt, str) else None, streams)

    def _parameters(self, given: Any) -> SamplingParams:
        if given is None:
            params = SamplingParams(temperature=0.0)
        else:
            params = given if isinstance(given, SamplingParams) else SamplingParams.from_generation_config(given)
        if params.max_tokens is not None and params.max_tokens > self._config.max_output_len:
            raise ConfigError(
                f"max_tokens of a request is at most max_output_len={self._config.max_output_len}. Found "
                f"{params.max_tokens}. Lower it, or raise max_output_len of the InferenceConfig."
            )
        if params.stop and self._tokenizer is None:
            raise ConfigError(
                f"Stop strings are looked for in the text of an output. Found stop={params.stop} for an engine without "
                "a tokenizer. Pass the engine one, or stop_token_ids."
            )
        return params

    def _tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            vocabulary = self._model.get_input_embeddings().num_embeddings
            wrong = [each for each in prompt if not isinstance(each, int) or not 0 <= each < vocabulary]
            if wrong:
                raise ConfigError(
                    f"Tokens of a prompt are integers from 0 to {vocabulary - 1}. Found {wrong[0]!r}. Pass tokens of "
                    "the tokenizer of this model."
                )
            return tuple(prompt)
        if self._tokenizer is None:
            raise ConfigError(
                "A prompt is tokens where the engine has no tokenizer. Found a text. Pass the engine a tokenizer, or "
                "tokens."
            )
        return tuple(self._tokenizer(prompt)["input_ids"])
