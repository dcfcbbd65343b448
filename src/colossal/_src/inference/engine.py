"""Generates text for many requests at once."""

from collections.abc import Generator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike, fspath
from typing import Any, Literal, overload

import torch
from torch import nn

from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.documented_generate import requests_of, texts_of
from colossal._src.inference.engine_core import EngineCore
from colossal._src.inference.follower import follow, follow_generate
from colossal._src.inference.model_facts import check_length, checked_config, default_config, load_model
from colossal._src.inference.peers import Message, Peers, form_mesh
from colossal._src.inference.preparation import NewRequest, Prompt, Prompts, Request, RequestPreparer, new_requests
from colossal._src.inference.request_table import RequestId
from colossal._src.inference.requests import RequestOutput
from colossal._src.inference.statistics import EngineStatistics
from colossal._src.inference.weights import FixedWeights, weights_of
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError


class InferenceEngine:
    """Generates with a causal language model for many requests at once.

    Requests may come and go at any step. Prompts of any length and outputs are computed together; keys and values are
    in pages, which requests share as far as they begin with the same tokens. Any model of transformers that keeps
    nothing but keys and values works, with its own forward. The engine uses the parameters of the model where they are,
    and forgets what they computed when they change; after writes to their `data` call `reset_prefix_cache`.

    A model that a Booster trains generates with its newest weights, in evaluation mode whatever mode it is in, and goes
    on training as if it had not: the engine finds out by itself that weights have changed. All ranks call `generate`,
    or `step`, together. The tensor-parallel ranks and pipeline stages of a model have the same requests; those of other
    data-parallel ranks may differ. Gemini and FSDP gather all parameters meanwhile, once a call.

    With `tp_size` and `pp_size` ranks shard the model: each has some heads of the layers of its stage, and their pages.
    The first of them schedules and samples. All ranks call `generate` with the same prompts, and get the same outputs;
    or the first one calls `add_request` and `step`, and in the end `close`, while the others `follow`. Batches of a
    step, such as long prompts and single tokens, pass through the stages one behind the other.

    Args:
        model_or_path: A causal language model of transformers, boosted, or in evaluation mode; or a folder that has
            one. Several ranks shard it in place; of a folder with safetensors files each reads its shard only. A model
            of a folder is on the current device; on a CPU, in float32 and bfloat16, its weights are packed, and norms,
            gates and rotary embeddings of most families computed in one pass each, which makes it faster.
        tokenizer: A tokenizer of transformers. None takes that of the folder, and for a model none: prompts are then
            tokens, and outputs have no text.
        inference_config: How much it holds and computes at once. By default prompts and outputs have up to 256 tokens,
            or half of the positions of the model if those are fewer.

    Attributes:
        config: How much it holds and computes at once.
        model: The model of transformers.
        tokenizer: The tokenizer, or None.

    Raises:
        ConfigError: The configuration is of another type, or in the place of the tokenizer. The model is in training
            mode, has another dtype or fewer positions than the configuration says, or differs between ranks; it has
            fewer layers than `pp_size`; there are no `tp_size` times `pp_size` ranks, or it is boosted and one of them
            is not 1.
        UnsupportedError: The model has an encoder, keeps other states than keys and values, is to be sharded and of a
            family without a table, or one without stages, or is boosted with stages that pass more than hidden states,
            with sequence parallelism, or with experts that ranks with other requests use.
        PlanError: Its heads cannot be sharded over so many ranks.

    Communication: digests of the parameters are compared; then, in every step, a broadcast of what is to be computed,
    what the layers of a sharded model need, send, pp, of hidden states, and the logits of the tokens that are sampled.

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
        from colossal._src.inference.fused_modules import fuse_modules
        from colossal._src.inference.packed_weights import pack_weights
        from colossal._src.inference.runner import ModelRunner
        from colossal._src.inference.sharding import shard

        config = checked_config(tokenizer, inference_config)
        mesh = form_mesh(config)
        if isinstance(model_or_path, nn.Module):
            self._weights = weights_of(model_or_path, config)
        else:
            model, tokenizer = load_model(fspath(model_or_path), tokenizer, config.dtype, lazily=mesh is not None)
            if mesh is None:  # else each rank moves its shard
                model.to(get_current_device())
            self._weights = FixedWeights(model)
        model = self._weights.model
        check_model(model)
        if inference_config is None:
            config = default_config(model)
        check_length(model, config)
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self._preparer = RequestPreparer(model, tokenizer, config)
        self._peers = None if mesh is None else Peers(mesh, config)
        of_rank = None if mesh is None else shard(model, mesh)
        if not isinstance(model_or_path, nn.Module):
            pack_weights(model)
            fuse_modules(model)
        self._runner = ModelRunner(
            model,
            parts=self._weights.parts,
            num_rows=config.max_batch_size,
            max_length=config.max_length,
            num_pages=config.total_blocks,
            page_size=config.block_size,
            batch_invariant=config.batch_invariant,
            forward=self._weights.forward,
            shard=of_rank,
        )
        self._core = EngineCore(config, self._weights.seed)

    @overload
    def generate(
        self, requests: Prompts, parameters: Any = None, /, *, generation_config: Any = None
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
        requests: Prompts | None = None,
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
            parameters: `SamplingParams` or a `transformers.GenerationConfig`, or a list with one for each prompt. None
                takes the most probable tokens.
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
            ConfigError: A prompt is empty or too long, parameters do not fit the engine, the model is in training mode,
                or ranks that shard it pass others; in the first form it has other requests; in the second it has no
                tokenizer.
            CommunicationError: A rank has failed, or is lost.

        Communication: of its steps; on ranks that shard the model, before and after them, prompts and outputs are
        gathered from all of them.
        """
        chosen = parameters if generation_config is None else generation_config
        if requests is None:
            new = requests_of(self.tokenizer, request_ids, prompts, prompts_token_ids, chosen)
            return texts_of(self.tokenizer, self._generate(new), return_token_ids)
        if self.has_requests:
            raise ConfigError(
                f"generate returns outputs of its own prompts. Found {len(self._core.requests)} requests that were "
                "added before, whose outputs would be lost. Call step until has_requests is False, or abort them."
            )
        return self._generate(new_requests(requests, chosen))

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
        prompt = self._preparer.listed(prompt)
        self._core.renew(self._weights)
        self._weights.check_requests((prompt, generation_config, request_id))
        return self._core.add(request_id, self._preparer.prepare(prompt, generation_config))

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
        return len(self._core.requests) > 0

    def step(self) -> list[RequestOutput]:
        """Compute some tokens of the requests that wait or run.

        Returns:
            Those that have new tokens, the last time when they are finished.

        Raises:
            ConfigError: The model is in training mode, or this is not the first of the ranks that shard it.
            CommunicationError: A rank is lost.

        Communication: a broadcast, and what the layers of a sharded model need; also if there is nothing to compute.
        """
        self._check_is_first("step")
        with self._weights_in_use():
            with self._failures_are_told():
                plan, record = self._core.plan()
            if self._peers is not None:
                self._peers.send(Message.STEP, record.to_integers())
            logits = self._runner.run(record)  # where ranks fail together, or lose one that does
        with self._failures_are_told():
            return self._core.take(plan, logits)

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
        with self._weights_in_use():
            logits = self._runner.prompt_logits(prompt)
        assert logits is not None
        return logits

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
        return self._core.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget the tokens of all pages, whose keys and values the parameters do not compute any more.

        Raises:
            ConfigError: Requests run, whose pages other parameters would continue.
        """
        self._core.forget_prefixes()

    @property
    def statistics(self) -> EngineStatistics:
        """What the engine holds, and has done since it was built."""
        return self._core.statistics

    # ------------------------------------------------------------------------------------------ requests

    def _generate(self, new: Items[NewRequest]) -> list[RequestOutput]:
        """Finish some requests, and those that were added before; on all ranks that shard the model."""
        self._weights.check_requests(new)
        self._core.renew(self._weights)
        with self._weights_in_use():
            requests = self._preparer.prepare_all(new)
            if self._peers is None:
                return self._finish_all(requests)
            described = "\n".join(f"{request_id} {request.describe()}" for request_id, request in requests)
            if not self._peers.is_first:
                return follow_generate(self._peers, self._runner, described)
            self._peers.send(Message.GENERATE)
            self._peers.check_prompts(described)
            outputs = self._finish_all(requests)
            self._peers.send(Message.OUTPUTS)
            return self._peers.share(outputs)

    def _finish_all(self, new: Items[tuple[RequestId | None, Request]]) -> list[RequestOutput]:
        ids = self._core.requests.ids()
        num_before = len(ids)
        finished: dict[RequestId, RequestOutput] = {}
        try:
            for request_id, request in new:
                ids.append(self._core.add(request_id, request))
            while self.has_requests:
                finished |= {output.request_id: output for output in self.step() if output.is_finished}
        finally:
            for request_id in ids[num_before:]:
                self.abort(request_id)  # those that an exception leaves behind
        return [finished[request_id] for request_id in ids]

    @contextmanager
    def _weights_in_use(self) -> Generator[None]:
        """Compute with the newest weights, also of tokens that older ones had computed."""
        with self._weights.in_use() as are_new:
            if are_new:
                self._core.scheduler.restart()
            yield

    # ------------------------------------------------------------------------------------------ ranks

    def _check_is_first(self, name: str) -> None:
        if self._peers is not None and not self.takes_requests:
            raise ConfigError(
                f"The first of the ranks that shard a model takes requests. Found {name} on rank "
                f"{self._peers.mesh.global_rank}. Call follow there, or generate on all of them."
            )

    def _failures_are_told(self) -> AbstractContextManager[None]:
        """Around what the first rank does alone, for which the others wait."""
        return nullcontext() if self._peers is None else self._peers.telling_failures()
