"""Generates text for many requests at once."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from torch import nn

from colossal._src.inference.chunking import AnyChunks, FixedChunks
from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.model_facts import check_length, end_tokens_of, load_model
from colossal._src.inference.pages import PagePool
from colossal._src.inference.requests import CompletionOutput, RequestOutput, Sequence
from colossal._src.inference.sampling import SampledToken, Sampler
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.scheduler import Scheduler
from colossal._src.inference.text import TextStream
from colossal.errors import ConfigError

RequestId = int | str
Prompt = str | Items[int]


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine holds, and has done since it was built.

    Args:
        num_waiting: Sequences that wait for room.
        num_running: Sequences that have pages.
        num_pages: Pages that there are.
        num_used_pages: Pages that sequences own.
        num_cached_pages: Pages that no sequence owns, and that hold the tokens of an earlier one.
        num_steps: Steps so far.
        num_prompt_tokens: Tokens of all sequences when they were admitted, after a preemption once more.
        num_hit_tokens: Of these, the tokens that were not computed because pages held them.
        num_generated_tokens: Tokens of all outputs.
        num_preempted: How often a sequence lost its pages to an earlier one, and was computed again.

    Example:
        >>> from colossal.inference import EngineStatistics
        >>> EngineStatistics(num_pages=8).num_used_pages
        0
    """

    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    num_cached_pages: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_preempted: int = 0


@dataclass(frozen=True)
class _Request:
    """A prompt, and the sequences that answer it, each with its text."""

    prompt: str | None
    sequences: Mapping[Sequence, TextStream]


class InferenceEngine:
    """Generates with a causal language model for many requests at once.

    Requests may come and go at any step. Prompts of any length and outputs are computed together; keys and values are
    in pages, which requests share as far as they begin with the same tokens. Any model of transformers that keeps
    nothing but keys and values works, with its own forward. The engine uses the parameters of the model where they are:
    after they have changed, `reset_prefix_cache` forgets what the old ones computed.

    Args:
        model_or_path: A causal language model of transformers in evaluation mode, or a folder that has one.
        tokenizer: A tokenizer of transformers. None takes that of the folder, and for a model none: prompts are then
            tokens, and outputs have no text.
        inference_config: How much it holds and computes at once.

    Attributes:
        config: How much it holds and computes at once.
        model: The model.
        tokenizer: The tokenizer, or None.

    Raises:
        ConfigError: The model is in training mode, or has another dtype or fewer positions than the configuration says.
        UnsupportedError: The model has an encoder, or keeps other states than keys and values.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from colossal.inference import InferenceConfig, InferenceEngine, SamplingParams
        >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()
        >>> engine = InferenceEngine(model, inference_config=InferenceConfig(max_input_len=8, max_output_len=8))
        >>> params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        >>> [len(output.outputs[0].token_ids) for output in engine.generate([[5, 6], [7]], params)]
        [3, 3]
    """

    def __init__(
        self,
        model_or_path: nn.Module | str | PathLike[str],
        tokenizer: Any = None,
        inference_config: InferenceConfig | None = None,
    ) -> None:
        # the cache is a class of transformers, which `import colossal.inference` must not load
        from colossal._src.inference.cache import check_model
        from colossal._src.inference.runner import ModelRunner

        config = InferenceConfig() if inference_config is None else inference_config
        if isinstance(model_or_path, nn.Module):
            model = model_or_path
        else:
            model, tokenizer = load_model(fspath(model_or_path), tokenizer, config.dtype)
        check_model(model)
        check_length(model, config)
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._end_tokens = end_tokens_of(model, tokenizer)
        self._runner = ModelRunner(
            model,
            num_rows=config.max_batch_size,
            max_length=config.max_length,
            num_pages=config.total_blocks,
            page_size=config.block_size,
            batch_invariant=config.batch_invariant,
        )
        self._scheduler = Scheduler(
            PagePool(config.total_blocks, config.block_size),
            FixedChunks(config.chunk_tokens) if config.batch_invariant else AnyChunks(),
            max_batch_size=config.max_batch_size,
            max_tokens=config.step_tokens,
            output_reserve=config.output_reserve,
            shares_prefixes=config.prefix_cache,
        )
        self._sampler = Sampler()
        self._requests: dict[RequestId, _Request] = {}
        self._owner: dict[Sequence, RequestId] = {}
        self._next_id = 0
        self._num_steps = 0
        self._num_generated = 0

    def generate(self, prompts: Prompt | Items[Prompt], generation_config: Any = None) -> list[RequestOutput]:
        """Generate for some prompts, until all of them are finished.

        Args:
            prompts: Texts, or lists of tokens, or one of them.
            generation_config: `SamplingParams` or a `transformers.GenerationConfig` for all prompts, or a list with one
                for each. None takes the most probable tokens.

        Returns:
            The outputs in the order of the prompts.

        Raises:
            ConfigError: A prompt is empty or too long, parameters do not fit the engine, or it has other requests.
        """
        if self._requests:
            raise ConfigError(
                f"generate returns outputs of its own prompts. Found {len(self._requests)} requests that were added "
                "before, whose outputs would be lost. Call step until has_requests is False, or abort them."
            )
        is_one = isinstance(prompts, str) or any(isinstance(each, int) for each in prompts)
        all_prompts: list[Any] = [prompts] if is_one else list(prompts)
        is_list = isinstance(generation_config, list | tuple)
        parameters = list(generation_config) if is_list else [generation_config] * len(all_prompts)
        if len(parameters) != len(all_prompts):
            raise ConfigError(
                f"There is one generation config for all prompts, or one for each. Found {len(parameters)} for "
                f"{len(all_prompts)} prompts. Pass one, or as many."
            )
        requests = [self._prepare(prompt, each) for prompt, each in zip(all_prompts, parameters, strict=True)]
        ids = [self._add(self._new_id(), request) for request in requests]
        finished: dict[RequestId, RequestOutput] = {}
        try:
            while self._requests:
                finished |= {output.request_id: output for output in self.step() if output.is_finished}
        finally:
            for request_id in ids:
                self.abort(request_id)  # those that an exception leaves behind
        return [finished[request_id] for request_id in ids]

    def add_request(
        self, prompt: Prompt, generation_config: Any = None, *, request_id: RequestId | None = None
    ) -> RequestId:
        """Let a request wait for the next steps.

        Args:
            prompt: A text, or its tokens.
            generation_config: `SamplingParams` or a `transformers.GenerationConfig`. None takes the most probable
                tokens.
            request_id: What its outputs are called; None for a number.

        Returns:
            The id.

        Raises:
            ConfigError: The prompt is empty or too long, parameters do not fit the engine, or the id is in use.
        """
        request = self._prepare(prompt, generation_config)
        if request_id in self._requests:
            raise ConfigError(
                f"Each request that is not finished has an id of its own. Found {request_id!r}, which is in use. Pass "
                "another one, or none."
            )
        return self._add(self._new_id() if request_id is None else request_id, request)

    @property
    def has_requests(self) -> bool:
        """Whether a step has something to compute."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Compute some tokens of the requests that wait or run.

        Returns:
            Those that have new tokens, the last time when they are finished.

        Raises:
            ConfigError: The model is in training mode.
        """
        if self.model.training:
            raise ConfigError(
                "A model generates in evaluation mode, without dropout. Found one in training mode. Call model.eval()."
            )
        plan = self._scheduler.plan()
        sampled = self._sampler.sample(self._runner.run(plan))
        self._scheduler.advance(plan)
        for sequence, token in sampled.items():
            self._append(sequence, token)
        self._num_steps += 1
        self._num_generated += len(sampled)
        return self._collect({self._owner[sequence]: None for sequence in sampled})

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request, wherever it is, and free its pages at once.

        Args:
            request_id: Of the request.

        Returns:
            What there is of it, or None if there is no such request, which may have just finished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._finish(sequence, "abort")
        [output] = self._collect([request_id])
        return output

    def reset_prefix_cache(self) -> None:
        """Forget the tokens of all pages, whose keys and values the parameters do not compute any more.

        Raises:
            ConfigError: Requests run, whose pages other parameters would continue.
        """
        if self._scheduler.running:
            raise ConfigError(
                f"Pages are forgotten while no request runs. Found {len(self._scheduler.running)} that do. Call step "
                "until has_requests is False, or abort them."
            )
        self._scheduler.pool.forget_prefixes()

    @property
    def statistics(self) -> EngineStatistics:
        """What the engine holds, and has done since it was built."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        return EngineStatistics(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_pages=pool.num_pages,
            num_used_pages=pool.num_pages - pool.num_free,
            num_cached_pages=pool.num_cached,
            num_steps=self._num_steps,
            num_prompt_tokens=scheduler.num_admitted_tokens,
            num_hit_tokens=scheduler.num_hit_tokens,
            num_generated_tokens=self._num_generated,
            num_preempted=scheduler.num_preempted,
        )

    # ------------------------------------------------------------------------------------------ requests

    def _prepare(self, prompt: Prompt, generation_config: Any) -> _Request:
        """Check a request, and make its sequences, before anything is added."""
        params = self._parameters(generation_config)
        tokens = self._tokenize(prompt)
        if not 1 <= len(tokens) <= self.config.max_input_len:
            raise ConfigError(
                f"A prompt has 1 to max_input_len={self.config.max_input_len} tokens. Found {len(tokens)}. Shorten it, "
                "or raise max_input_len of the InferenceConfig."
            )
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_tokens)}
        sequences = [
            Sequence(tokens, params, params.max_tokens or self.config.max_output_len, frozenset(ends), index)
            for index in range(params.n)
        ]
        for sequence in sequences[1:]:
            sequence.leader = sequences[0]
        streams = {sequence: TextStream(self.tokenizer, params.stop) for sequence in sequences}
        return _Request(prompt if isinstance(prompt, str) else None, streams)

    def _parameters(self, given: Any) -> SamplingParams:
        if given is None:
            params = SamplingParams(temperature=0.0)
        else:
            params = given if isinstance(given, SamplingParams) else SamplingParams.from_generation_config(given)
        if params.max_tokens is not None and params.max_tokens > self.config.max_output_len:
            raise ConfigError(
                f"max_tokens of a request is at most max_output_len={self.config.max_output_len}. Found "
                f"{params.max_tokens}. Lower it, or raise max_output_len of the InferenceConfig."
            )
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                f"Stop strings are looked for in the text of an output. Found stop={params.stop} for an engine without "
                "a tokenizer. Pass the engine one, or stop_token_ids."
            )
        return params

    def _tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            vocabulary = self.model.get_input_embeddings().num_embeddings  # pyright: ignore[reportCallIssue]
            wrong = [each for each in prompt if not isinstance(each, int) or not 0 <= each < vocabulary]
            if wrong:
                raise ConfigError(
                    f"Tokens of a prompt are integers from 0 to {vocabulary - 1}. Found {wrong[0]!r}. Pass tokens of "
                    "the tokenizer of this model."
                )
            return tuple(prompt)
        if self.tokenizer is None:
            raise ConfigError(
                "A prompt is tokens where the engine has no tokenizer. Found a text. Pass the engine a tokenizer, or "
                "tokens."
            )
        return tuple(self.tokenizer(prompt)["input_ids"])

    def _new_id(self) -> int:
        while self._next_id in self._requests:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _add(self, request_id: RequestId, request: _Request) -> RequestId:
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._owner[sequence] = request_id
            self._scheduler.add(sequence)
        return request_id

    # ------------------------------------------------------------------------------------------ tokens

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        """Give a sequence its next token, and end it if that is the last one."""
        stream = self._requests[self._owner[sequence]].sequences[sequence]
        sequence.outputs.append(sampled.token_id)
        if sampled.logprob is not None:
            sequence.logprobs.append(sampled.logprob)
        stream.add(sampled.token_id)
        reason = sequence.reason_to_finish()
        if reason or stream.stopped:
            self._finish(sequence, "stop" if stream.stopped else reason or "")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self._scheduler.finish(sequence, reason)
        self._sampler.forget(sequence)

    def _collect(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """What there is of requests; those that are finished are forgotten."""
        outputs = [self._output(request_id, self._requests[request_id]) for request_id in request_ids]
        for output in outputs:
            if output.is_finished:
                for sequence in self._requests.pop(output.request_id).sequences:
                    del self._owner[sequence]
        return outputs

    def _output(self, request_id: RequestId, request: _Request) -> RequestOutput:
        first = next(iter(request.sequences))
        outputs = tuple(
            CompletionOutput(
                index=sequence.index,
                token_ids=tuple(sequence.outputs),
                text=stream.finish() if sequence.is_finished else stream.text,
                logprobs=None if sequence.params.logprobs is None else tuple(sequence.logprobs),
                finish_reason=sequence.finish_reason,
            )
            for sequence, stream in request.sequences.items()
        )
        return RequestOutput(request_id, request.prompt, first.prompt, outputs)
