"""Checks requests, and makes their sequences, before anything is added."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch

from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.model_facts import end_tokens_of, pad_token_of
from colossal._src.inference.requests import CompletionOutput, RequestOutput, Sequence
from colossal._src.inference.sampling_params import SamplingParams, plain
from colossal._src.inference.text import TextStream
from colossal.errors import ConfigError

Prompt = str | Items[int]
Prompts = Prompt | torch.Tensor | Items[Prompt | torch.Tensor]
"""One, or several; a matrix of tokens has one in each row."""

_A_PROMPT = "A prompt is a text, or a list of tokens."

NewRequest = tuple[int | str | None, Prompt, Any]
"""Id, prompt and parameters."""


@dataclass(frozen=True)
class Request:
    """A prompt, and the sequences that answer it, each with its text."""

    prompt: str | None
    sequences: Mapping[Sequence, TextStream]

    def describe(self) -> str:
        """What is asked for, in a text that ranks compare."""
        first = next(iter(self.sequences))
        return f"{first.prompt} {first.params} {first.max_tokens} {sorted(first.end_tokens)}"

    def output(self, request_id: int | str) -> RequestOutput:
        """What there is of it."""
        outputs = tuple(
            CompletionOutput(
                index=sequence.index,
                token_ids=tuple(sequence.outputs),
                text=stream.finish() if sequence.is_finished else stream.text,
                logprobs=None if sequence.params.logprobs is None else tuple(sequence.logprobs),
                finish_reason=sequence.finish_reason,
            )
            for sequence, stream in self.sequences.items()
        )
        return RequestOutput(request_id, self.prompt, next(iter(self.sequences)).prompt, outputs)


def new_requests(prompts: Prompts, generation_config: Any) -> list[NewRequest]:
    """Give the prompts of one call their generation config: one for all, or one each."""
    prompts = as_list(prompts)
    is_one = isinstance(prompts, str) or any(isinstance(plain(each), int) for each in prompts)
    all_prompts: list[Any] = [prompts] if is_one else [as_list(each) for each in prompts]
    is_list = isinstance(generation_config, list | tuple)
    parameters = list(generation_config) if is_list else [generation_config] * len(all_prompts)
    if len(parameters) != len(all_prompts):
        raise ConfigError(
            f"There is one generation config for all prompts, or one for each. Found {len(parameters)} for "
            f"{len(all_prompts)} prompts. Pass one, or as many."
        )
    return [(None, prompt, each) for prompt, each in zip(all_prompts, parameters, strict=True)]


def as_list(prompts: Any) -> Any:
    """Lists in place of tensors and arrays; refuse what a tokenizer returns, a dict, of which a loop takes the keys."""
    if isinstance(prompts, Mapping):
        found, instead = ", ".join(map(str, prompts)), "Pass what is under input_ids, without padding."
        raise ConfigError(f"{_A_PROMPT} Found a {type(prompts).__name__} with {found}. {instead}")
    found = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(found, Iterable):
        raise ConfigError(f"{_A_PROMPT} Found {found!r}. Pass one of them, or a list of them.")
    return found


class RequestPreparer:
    """Knows what a request can ask of an engine."""

    def __init__(self, model: Any, tokenizer: Any, config: InferenceConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._end_tokens = end_tokens_of(model, tokenizer)
        self._pad_token = pad_token_of(model, tokenizer)

    listed = staticmethod(as_list)

    def prepare_all(self, new: Items[NewRequest]) -> list[tuple[int | str | None, Request]]:
        """Check the requests of one call, and make their sequences."""
        self._check_padding([prompt for _, prompt, _ in new])
        return [(request_id, self.prepare(prompt, config)) for request_id, prompt, config in new]

    def prepare(self, prompt: Prompt, generation_config: Any) -> Request:
        """Check a request, and make its sequences."""
        tokens = self._tokenize(prompt)
        if not 1 <= len(tokens) <= self._config.max_input_len:
            instead = "Shorten it, or raise max_input_len of the InferenceConfig" if tokens else "Pass at least one"
            raise ConfigError(
                f"A prompt has 1 to max_input_len={self._config.max_input_len} tokens. Found {len(tokens)}. {instead}."
            )
        params = self._parameters(generation_config, len(tokens))
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_tokens)}
        sequences = [
            Sequence(tokens, params, params.max_tokens or self._config.max_output_len, frozenset(ends), index)
            for index in range(params.n)
        ]
        for sequence in sequences[1:]:
            sequence.leader = sequences[0]
        streams = {sequence: TextStream(self._tokenizer, params.stop) for sequence in sequences}
        return Request(prompt if isinstance(prompt, str) else None, streams)

    def _check_padding(self, prompts: Items[Prompt]) -> None:
        """Refuse the rows of a padded batch, which are as long as each other: nothing says which tokens count."""
        rows = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if self._pad_token is None or len({len(row) for row in rows}) != 1:
            return
        for place, side in ((0, "begin"), (-1, "end")):
            padded = [number for number, row in enumerate(rows) if len(row) and plain(row[place]) == self._pad_token]
            if 0 < len(padded) < len(rows):
                raise ConfigError(
                    "Prompts are tokens without padding, and may differ in length. Found rows of one length of which "
                    f"some, as number {padded[0]}, {side} with the padding token {self._pad_token}. Pass texts, or "
                    "lists of tokens without it; a prompt that it belongs to, in a call of its own."
                )

    def _parameters(self, given: Any, prompt_length: int) -> SamplingParams:
        if given is None:
            params = SamplingParams(temperature=0.0)
        elif isinstance(given, SamplingParams):
            params = given
        else:
            params = SamplingParams.from_generation_config(given, prompt_length=prompt_length)
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
            tokens = tuple(map(plain, prompt))
            # a bool is an int of Python, and no token
            wrong = [each for each in tokens if type(each) is not int or not 0 <= each < self._vocabulary]
            if wrong:
                raise ConfigError(
                    f"Tokens of a prompt are integers from 0 to {self._vocabulary - 1}. Found {wrong[0]!r}. Pass "
                    "tokens of the tokenizer of this model."
                )
            return tokens
        if self._tokenizer is None:
            raise ConfigError(
                "A prompt is tokens where the engine has no tokenizer. Found a text. Pass the engine a tokenizer, or "
                "tokens."
            )
        return tuple(self._tokenizer(prompt)["input_ids"])
