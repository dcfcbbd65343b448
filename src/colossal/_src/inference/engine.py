"""Generates text for many requests at once."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn

from colossal._src.inference.chunking import AnyChunks, FixedChunks
from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.follower import follow, follow_generate
from colossal._src.inference.model_facts import check_length, load_model
from colossal._src.inference.pages import PagePool
from colossal._src.inference.peers import Message, Peers, form_mesh
from colossal._src.inference.preparation import Prompt, Request, RequestPreparer
from colossal._src.inference.requests import RequestOutput, Sequence
from colossal._src.inference.sampling import SampledToken, Sampler
from colossal._src.inference.scheduler import Scheduler, StepPlan
from colossal._src.inference.statistics import EngineStatistics
from colossal._src.inference.step_record import StepRecorder
from colossal.errors import ConfigError

RequestId = int | str


class InferenceEngine:
    """Generates with a causal language model for many requests at once.

    Requests may come and go at any step. Prompts of any length and outputs are computed together; keys and values are
    in pages, which requests share as far as they begin with the same tokens. Any model of transformers that keeps
    nothing but keys and values works, with its own forward. The engine uses the parameters of the model where they are:
    after they have changed, `reset_prefix_cache` forgets what the old ones computed.

    With `tp_size` ranks shard the model, and each has the pages of its own heads. The first of them schedules and
    samples. All ranks call `generate` with the same prompts, and get the same outputs; or the first one calls
    `add_request` and `step`, and in the end `close`, while the others `follow`.

    Args:
        model_or_path: A causal language model of transformers in evaluation mode, or a folder that has one. Ranks shard
            it in place; of a folder with safetensors files each reads its shard only.
        tokenizer: A tokenizer of transformers. None takes that of the folder, and for a model none: prompts are then
            tokens, and outputs have no text.
        inference_config: How much it holds and computes at once.

    Attributes:
        config: How much it holds and computes at once.
        model: The model.
        tokenizer: The tokenizer, or None.

    Raises:
        ConfigError: The model is in training mode, has another dtype or fewer positions than the configuration says, or
            differs between ranks; or there are no `tp_size` ranks.
        UnsupportedError: The model has an encoder, keeps other states than keys and values, or is to be sharded and of
            a family without a table.
        PlanError: Its heads cannot be sharded over so many ranks.

    Communication: digests of the parameters are compared; then, in every step, a broadcast of what is to be computed,
    and what the layers of a sharded model and the logits of the tokens that are sampled need.

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
        from colossal._src.inference.sharding import shard

        config = InferenceConfig() if inference_config is None else inference_config
        mesh = form_mesh(config)
        if isinstance(model_or_path, nn.Module):
            model = model_or_path
        else:
            model, tokenizer = load_model(fspath(model_or_path), tokenizer, config.dtype, lazily=mesh is not None)
        check_model(model)
        check_length(model, config)
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._preparer = RequestPreparer(model, tokenizer, config)
        self._peers = None if mesh is None else Peers(mesh, config)
        self._recorder = StepRecorder(config.max_batch_size)
        self._runner = ModelRunner(
            model,
            num_rows=config.max_batch_size,
            max_length=config.max_length,
            num_pages=config.total_blocks,
            page_size=config.block_size,
            batch_invariant=config.batch_invariant,
            full_logits=None if mesh is None else shard(model, mesh),
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
        self._requests: dict[RequestId, Request] = {}
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
            ConfigError: A prompt is empty or too long, parameters do not fit the engine, it has other requests, the
                model is in training mode, or ranks have different prompts.
            CommunicationError: A rank has failed, or is lost.

        Communication: of its steps; before and after them, prompts and outputs are gathered from all ranks.
        """
        self._check_evaluates()
        if self._requests:
            raise ConfigError(
                f"generate returns outputs of its own prompts. Found {len(self._requests)} requests that were added "
                "before, whose outputs would be lost. Call step until has_requests is False, or abort them."
            )
        requests = self._preparer.prepare_all(prompts, generation_config)
        if self._peers is None:
            return self._generate(requests)
        described = "\n".join(request.describe() for request in requests)
        if not self._peers.is_first:
            return follow_generate(self._peers, self._runner, described)
        self._peers.send(Message.GENERATE)
        self._peers.check_prompts(described)
        outputs = self._generate(requests)
        self._peers.send(Message.OUTPUTS)
        return self._peers.share(outputs)

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
            ConfigError: The prompt is empty or too long, parameters do not fit the engine, the id is in use, or this is
                not the first of the ranks that shard the model.
        """
        self._check_is_first("add_request")
        request = self._preparer.prepare(prompt, generation_config)
        if request_id in self._requests:
            raise ConfigError(
                f"Each request that is not finished has an id of its own. Found {request_id!r}, which is in use. Pass "
                "another one, or none."
            )
        return self._add(self._new_id() if request_id is None else request_id, request)

    @property
    def takes_requests(self) -> bool:
        """Whether requests are added and steps called on this rank: on the only one, or the first."""
        return self._peers is None or self._peers.is_first

    @property
    def has_followers(self) -> bool:
        """Whether other ranks wait for steps of this one: not much longer than the timeout of their process group."""
        return self._peers is not None and self._peers.is_first

    @property
    def has_requests(self) -> bool:
        """Whether a step has something to compute."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Compute some tokens of the requests that wait or run.

        Returns:
            Those that have new tokens, the last time when they are finished.

        Raises:
            ConfigError: The model is in training mode, or this is not the first of the ranks that shard it.
            CommunicationError: A rank is lost.

        Communication: a broadcast, and what the layers of a sharded model need; also if there is nothing to compute.
        """
        self._check_evaluates()
        self._check_is_first("step")
        with self._failures_are_told():
            plan = self._scheduler.plan()
            record = self._recorder.record(plan)
        if self._peers is not None:
            self._peers.send(Message.STEP, record.to_integers())
        logits = self._runner.run(record)  # where ranks fail together, or lose one that does
        with self._failures_are_told():
            return self._take_step(plan, logits)

    def prompt_logits(self, prompt: Items[int]) -> torch.Tensor:
        """Compute the logits of all tokens of a prompt, in a forward of its own: pages hold none.

        Args:
            prompt: Its tokens.

        Returns:
            The logits, [tokens, vocabulary].

        Raises:
            ConfigError: It is called on another rank than the first of those that shard the model.

        Communication: a broadcast, and what the layers of a sharded model need.
        """
        self._check_is_first("prompt_logits")
        if self._peers is not None:
            self._peers.send(Message.LOGITS, prompt)
        return self._runner.prompt_logits(prompt)

    def follow(self) -> None:
        """On all ranks of a sharded model but the first: compute the steps of that one, until it calls `close`.

        Raises:
            ConfigError: It is called on the first rank, or where one rank has all of the model.
            CommunicationError: The first rank has failed or is lost, or calls no step within the timeout of the process
                group.

        Communication: that of the steps.
        """
        if self._peers is None or self._peers.is_first:
            raise ConfigError(
                "The ranks that shard a model follow the first of them. Found the first, or the only one. Call "
                "add_request and step here, and in the end close."
            )
        follow(self._peers, self._runner)

    def close(self) -> None:
        """Let `follow` return on the other ranks; without them there is nothing to do.

        Communication: a broadcast.
        """
        if self._peers is not None and self.has_followers:
            self._peers.send(Message.END)

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

    def _generate(self, requests: Items[Request]) -> list[RequestOutput]:
        ids = [self._add(self._new_id(), request) for request in requests]
        finished: dict[RequestId, RequestOutput] = {}
        try:
            while self._requests:
                finished |= {output.request_id: output for output in self.step() if output.is_finished}
        finally:
            for request_id in ids:
                self.abort(request_id)  # those that an exception leaves behind
        return [finished[request_id] for request_id in ids]

    def _new_id(self) -> int:
        while self._next_id in self._requests:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _add(self, request_id: RequestId, request: Request) -> RequestId:
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._owner[sequence] = request_id
            self._scheduler.add(sequence)
        return request_id

    # ------------------------------------------------------------------------------------------ ranks

    def _check_evaluates(self) -> None:
        if self.model.training:
            raise ConfigError(
                "A model generates in evaluation mode, without dropout. Found one in training mode. Call model.eval()."
            )

    def _check_is_first(self, name: str) -> None:
        if self._peers is not None and not self.takes_requests:
            raise ConfigError(
                f"The first of the ranks that shard a model takes requests. Found {name} on rank "
                f"{self._peers.mesh.global_rank}. Call follow there, or generate on all of them."
            )

    def _failures_are_told(self) -> AbstractContextManager[None]:
        """Around what the first rank does alone, for which the others wait."""
        return nullcontext() if self._peers is None else self._peers.telling_failures()

    # ------------------------------------------------------------------------------------------ tokens

    def _take_step(self, plan: StepPlan, logits: Mapping[int, torch.Tensor]) -> list[RequestOutput]:
        """Sample the next tokens from the logits of chunks, by their place in the plan."""
        sampled = self._sampler.sample({plan[place].sequence: row for place, row in logits.items()})
        self._scheduler.advance(plan)
        for sequence, token in sampled.items():
            self._append(sequence, token)
        self._num_steps += bool(plan)
        self._num_generated += len(sampled)
        return self._collect({self._owner[sequence]: None for sequence in sampled})

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
        outputs = [self._requests[request_id].output(request_id) for request_id in request_ids]
        for output in outputs:
            if output.is_finished:
                for sequence in self._requests.pop(output.request_id).sequences:
                    del self._owner[sequence]
        return outputs
