"""Generates text for many requests at once."""

from collections.abc import Generator, Iterable
from collections.abc import Sequence as Items
from contextlib import contextmanager
from os import PathLike, fspath
from typing import Any, Literal, overload

from torch import nn

from colossal._src.inference.chunking import AnyChunks, FixedChunks
from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.documented_generate import requests_of, texts_of
from colossal._src.inference.engine_statistics import EngineStatistics
from colossal._src.inference.model_facts import check_length, load_model
from colossal._src.inference.pages import PagePool
from colossal._src.inference.request_builder import Prompt, Request, RequestBuilder
from colossal._src.inference.requests import CompletionOutput, RequestOutput, Sequence
from colossal._src.inference.sampling import SampledToken, Sampler
from colossal._src.inference.scheduler import Scheduler
from colossal._src.inference.weights import FixedWeights, weights_of
from colossal.errors import ConfigError

RequestId = int | str


class InferenceEngine:
    """Generates with a causal language model for many requests at once.

    Requests may come and go at any step. Prompts of any length and outputs are computed together; keys and values are
    in pages, which requests share as far as they begin with the same tokens. Any model of transformers that keeps
    nothing but keys and values works, with its own forward. The engine uses the parameters of the model where they are:
    after they have changed, `reset_prefix_cache` forgets what the old ones computed.

    A model that a Booster trains generates with its newest weights, in evaluation mode whatever mode it is in, and goes
    on training as if it had not: the engine finds out by itself that weights have changed. All ranks call `generate`,
    or `step`, together. With tensor parallelism all ranks of a group have the same requests; those of other
    data-parallel ranks may differ. Gemini and FSDP gather all parameters meanwhile, once a call.

    Args:
        model_or_path: A causal language model of transformers, boosted, or in evaluation mode; or a folder that has
            one.
        tokenizer: A tokenizer of transformers. None takes that of the folder, and for a model none: prompts are then
            tokens, and outputs have no text.
        inference_config: How much it holds and computes at once.

    Attributes:
        config: How much it holds and computes at once.
        model: The model of transformers.
        tokenizer: The tokenizer, or None.

    Raises:
        ConfigError: The model is in training mode, or has another dtype or fewer positions than the configuration says.
        UnsupportedError: The model has an encoder, or keeps other states than keys and values, or is boosted with
            pipeline stages, sequence parallelism, or experts that ranks with other requests use.

    Communication: of a boosted model with tensor parallelism all_reduce, tp, 8 bytes.

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
            self._weights = weights_of(model_or_path, is_batch_invariant=config.batch_invariant)
        else:
            model, tokenizer = load_model(fspath(model_or_path), tokenizer, config.dtype)
            self._weights = FixedWeights(model)
        model = self._weights.model
        check_model(model)
        check_length(model, config)
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._build = RequestBuilder(config, model, tokenizer)
        self._runner = ModelRunner(
            model,
            num_rows=config.max_batch_size,
            max_length=config.max_length,
            num_pages=config.total_blocks,
            page_size=config.block_size,
            batch_invariant=config.batch_invariant,
            forward=self._weights.forward,
        )
        self._scheduler = Scheduler(
            PagePool(config.total_blocks, config.block_size),
            FixedChunks(config.chunk_tokens) if config.batch_invariant else AnyChunks(),
            max_batch_size=config.max_batch_size,
            max_tokens=config.step_tokens,
            output_reserve=config.output_reserve,
            shares_prefixes=config.prefix_cache,
        )
        self._sampler = Sampler(self._weights.seed)
        self._requests: dict[RequestId, Request] = {}
        self._owner: dict[Sequence, RequestId] = {}
        self._next_id = 0
        self._num_steps = 0
        self._num_generated = 0

    @overload
    def generate(
        self, requests: Prompt | Items[Prompt], parameters: Any = None, /, *, generation_config: Any = None
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        /,
        *,
        request_ids: RequestId | Items[RequestId] | None = None,
        prompts: str | Items[str] | None = None,
        prompts_token_ids: Any = None,
        return_token_ids: Literal[False] = False,
        generation_config: Any = None,
    ) -> list[str]: ...

    @overload
    def generate(
        self,
        /,
        *,
        request_ids: RequestId | Items[RequestId] | None = None,
        prompts: str | Items[str] | None = None,
        prompts_token_ids: Any = None,
        return_token_ids: Literal[True],
        generation_config: Any = None,
    ) -> tuple[list[str], list[list[int]]]: ...

    def generate(
        self,
        requests: Prompt | Items[Prompt] | None = None,
        parameters: Any = None,
        /,
        *,
        request_ids: RequestId | Items[RequestId] | None = None,
        prompts: str | Items[str] | None = None,
        prompts_token_ids: Any = None,
        return_token_ids: bool = False,
        generation_config: Any = None,
    ) -> Any:
        """Generate for some prompts, until all of them are finished.

        There are two forms. `generate(requests, parameters)` returns all that there is of each output. With keywords
        alone it returns texts, as in earlier versions, also of requests that were added before.

        Args:
            requests: Prompts: texts, or lists of tokens, or one of them.
            parameters: `SamplingParams` or a `transformers.GenerationConfig` for all prompts, or a list with one for
                each. None takes the most probable tokens.
            request_ids: Ids of the prompts, or of one; numbers by default.
            prompts: Texts, or one text.
            prompts_token_ids: Their tokens, or those of prompts without texts: lists, or an array or tensor, (prompts,
                tokens).
            return_token_ids: Return the tokens of the outputs too.
            generation_config: Another name of `parameters`.

        Returns:
            A `RequestOutput` for each prompt, in their order. With keywords alone a text for each output, prompt and
            output together, in the order of their ids; and if they are asked for, also the tokens of each output
            without those of the prompt.

        Raises:
            ConfigError: A prompt is empty or too long, parameters do not fit the engine, or ranks that shard the model
                pass others; in the first form it has other requests; in the second it has no tokenizer.
        """
        chosen = parameters if generation_config is None else generation_config
        if requests is None:
            new = requests_of(self.tokenizer, request_ids, prompts, prompts_token_ids, chosen)
            return texts_of(self.tokenizer, self._generate(new), return_token_ids)
        if self._requests:
            raise ConfigError(
                f"generate returns outputs of its own prompts. Found {len(self._requests)} requests that were added "
                "before, whose outputs would be lost. Call step until has_requests is False, or abort them."
            )
        is_one = isinstance(requests, str) or any(isinstance(each, int) for each in requests)
        all_prompts: list[Any] = [requests] if is_one else list(requests)
        is_list = isinstance(chosen, list | tuple)
        configs = list(chosen) if is_list else [chosen] * len(all_prompts)
        if len(configs) != len(all_prompts):
            raise ConfigError(
                f"There is one generation config for all prompts, or one for each. Found {len(configs)} for "
                f"{len(all_prompts)} prompts. Pass one, or as many."
            )
        return self._generate([(None, prompt, each) for prompt, each in zip(all_prompts, configs, strict=True)])

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
        self._weights.check_requests((prompt, generation_config, request_id))
        return self._add(request_id, self._build(prompt, generation_config))

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
        with self._weights_in_use():
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

    def _generate(self, new: Items[tuple[RequestId | None, Prompt, Any]]) -> list[RequestOutput]:
        """Add requests, and finish all that there are: those that were added before are the first."""
        self._weights.check_requests(new)
        prepared = [self._build(prompt, config) for _, prompt, config in new]
        finished: dict[RequestId, RequestOutput] = dict.fromkeys(self._requests)  # type: ignore[arg-type] (filled below)
        ids: list[RequestId] = []
        try:
            for (request_id, *_), request in zip(new, prepared, strict=True):
                ids.append(self._add(request_id, request))
            finished |= dict.fromkeys(ids)  # type: ignore[arg-type] (as above)
            with self._weights_in_use():
                while self._requests:
                    finished |= {output.request_id: output for output in self.step() if output.is_finished}
        finally:
            for request_id in ids:
                self.abort(request_id)  # those that an exception leaves behind
        return list(finished.values())

    @contextmanager
    def _weights_in_use(self) -> Generator[None]:
        """Compute with the newest weights, also of tokens that older ones had computed."""
        with self._weights.in_use() as are_new:
            if are_new:
                self._scheduler.restart()
            yield

    def _new_id(self) -> int:
        while self._next_id in self._requests:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _add(self, request_id: RequestId | None, request: Request) -> RequestId:
        if request_id in self._requests:
            raise ConfigError(
                f"Each request that is not finished has an id of its own. Found {request_id!r}, which is in use. Pass "
                "another one, or none."
            )
        if request_id is None:
            request_id = self._new_id()
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

    def _output(self, request_id: RequestId, request: Request) -> RequestOutput:
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
