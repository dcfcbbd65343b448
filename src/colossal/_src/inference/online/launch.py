"""The documented way to start an engine, and to wait for its answers in coroutines."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.engine import InferenceEngine
from colossal._src.inference.online.batch_manager import BatchManagerForGeneration, SubmitEntry, TaskEntry
from colossal._src.inference.online.engine_thread import EngineThread
from colossal._src.inference.online.fitting import fit_config
from colossal._src.inference.online.refusals import QueueFullError
from colossal._src.inference.sampling_params import SamplingParams
from colossal.errors import ConfigError, UnsupportedError


class LaunchedEngine:
    """An `InferenceEngine` in a thread of its own, which `launch_engine` returns.

    Args:
        engine: The engine, which nothing else may call meanwhile.
        batch_manager: Which queries are generated together, one batch after another. None lets the engine compute all
            queries together, as they come.
        queue_size: The most queries that wait; 0 for any number.

    Communication: of the steps of an engine whose model ranks shard; else none.

    Example:
        >>> import asyncio
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from colossal.inference import InferenceConfig, InferenceEngine, LaunchedEngine
        >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, eos_token_id=None, **sizes)).eval()
        >>> async def ask():
        ...     engine = LaunchedEngine(InferenceEngine(model, inference_config=InferenceConfig()), None, queue_size=8)
        ...     engine.submit("a", {"input_ids": [5, 6], "max_tokens": 3})
        ...     tokens = await engine.wait("a")
        ...     engine.shutdown()
        ...     return len(tokens)
        >>> asyncio.run(ask())
        5
    """

    def __init__(
        self, engine: InferenceEngine, batch_manager: BatchManagerForGeneration | None, queue_size: int
    ) -> None:
        self.engine = engine
        self._thread = EngineThread(engine).start()
        self._batch_manager = batch_manager
        self._queue_size = queue_size
        self._answers: dict[Hashable, asyncio.Future[Tensor]] = {}
        self._waiting: deque[SubmitEntry] = deque()
        self._running: dict[asyncio.Task[None], tuple[Hashable, ...]] = {}  # with the queries of the batch

    def submit(self, uid: Hashable, data: Mapping[str, Any]) -> None:
        """Let a query wait; in a coroutine.

        Args:
            uid: What it is called.
            data: Its `input_ids`, a list of tokens, and `max_tokens`; `top_k`, `top_p` and `temperature` if it samples.

        Raises:
            QueueFullError: `queue_size` queries wait.
            ConfigError: The name is in use, or a key is missing.
        """
        if missing := {"input_ids", "max_tokens"} - set(data):
            raise ConfigError(f"A query has input_ids and max_tokens. Found no {missing.pop()}. Add it to the data.")
        if uid in self._answers:
            raise ConfigError(f"Each query has a name of its own. Found {uid!r}, which is in use. Pass another one.")
        if self._queue_size and len(self._waiting) >= self._queue_size:
            raise QueueFullError(f"At most {self._queue_size} queries wait. Found as many. Try again later.")
        self._answers[uid] = asyncio.get_running_loop().create_future()
        self._waiting.append(SubmitEntry(uid, data))
        self._start_next()

    async def wait(self, uid: Hashable) -> Tensor:
        """Wait for the answer to a query.

        Args:
            uid: What it is called.

        Returns:
            The tokens of prompt and output, [tokens].

        Raises:
            ConfigError: There is no such query, or it does not fit the engine.
        """
        if uid not in self._answers:
            raise ConfigError(f"An answer is waited for once, after submit. Found no query {uid!r}. Submit it first.")
        try:
            return await self._answers[uid]
        except asyncio.CancelledError:
            self._cancel(uid)
            raise
        finally:
            self._answers.pop(uid, None)

    def shutdown(self) -> None:
        """End the engine, and all queries with an error."""
        self._thread.stop()

    def _start_next(self) -> None:
        """Start what may start: one batch after the other, or, without a batch manager, as many as the engine runs."""
        most = self.engine.config.max_batch_size if self._batch_manager is None else 1
        while self._waiting and len(self._running) < most:
            manager = self._batch_manager or BatchManagerForGeneration()
            task, keywords = manager.make_batch(self._waiting)
            running = asyncio.get_running_loop().create_task(self._run(manager, task, keywords))
            self._running[running] = task.uids
            running.add_done_callback(self._finish)

    def _cancel(self, uid: Hashable) -> None:
        """End a query for which nobody waits, unless others are generated in its batch."""
        self._waiting = deque(entry for entry in self._waiting if entry.uid != uid)
        for running, uids in self._running.items():
            if uids == (uid,):
                running.cancel()

    def _finish(self, running: asyncio.Task[None]) -> None:
        del self._running[running]
        self._start_next()

    async def _run(self, manager: BatchManagerForGeneration, task: TaskEntry, keywords: dict[str, Any]) -> None:
        try:
            rows = await self._generate(task.batch, manager.pad_token_id)
        except Exception as error:  # noqa: BLE001 (raised where the answers are waited for)
            for uid in task.uids:
                self._settle(uid).set_exception(error)
        else:
            for uid, tokens in manager.split_batch(TaskEntry(task.uids, rows), **keywords):
                self._settle(uid).set_result(tokens)

    def _settle(self, uid: Hashable) -> "asyncio.Future[Tensor]":
        """The future of a query, or one that is nobody's after its client has gone."""
        future = self._answers.get(uid)
        return future if future is not None and not future.done() else asyncio.get_running_loop().create_future()

    async def _generate(self, batch: Mapping[str, Any], pad_token_id: int) -> Tensor:
        """Generate for a batch, whose rows get the same number of tokens, or fewer and padding."""
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        params = sampling_params(batch, max_tokens=batch["max_tokens"] - ids.shape[1])
        submission = self._thread.submit([row[kept].tolist() for row, kept in zip(ids, mask, strict=True)], params)
        try:
            outputs = [list(output.outputs[0].token_ids) for output in await submission.result()]
        finally:
            submission.close()
        longest = max(map(len, outputs))
        padded = [tokens + [pad_token_id] * (longest - len(tokens)) for tokens in outputs]
        return torch.cat([ids, ids.new_tensor(padded)], dim=1)


def sampling_params(data: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Read the documented keys of a query: without one of them it takes the most probable tokens."""
    given = {name: data[name] for name in ("top_k", "top_p", "temperature") if data.get(name) is not None}
    return SamplingParams(max_tokens=max_tokens, **(given or {"temperature": 0.0}))


def launch_engine(
    tp_world_size: int,
    pp_world_size: int,
    master_host: str,  # noqa: ARG001 (documented; one rank meets no others)
    master_port: int,  # noqa: ARG001
    rpc_port: int,  # noqa: ARG001
    model_fn: Callable[..., Any],
    batch_manager: BatchManagerForGeneration | None = None,
    pipe_size: int = 1,  # noqa: ARG001
    queue_size: int = 0,
    **model_kwargs: Any,
) -> LaunchedEngine:
    """Start an engine that answers queries of coroutines.

    Args:
        tp_world_size: Ranks that shard the model; 1, as it starts no other processes.
        pp_world_size: Stages of the model; 1.
        master_host: Where ranks meet; for one rank of no effect, as the next two.
        master_port: The port there.
        rpc_port: The port of the ranks.
        model_fn: Returns the model, a causal language model of transformers, or an `InferenceEngine`.
        batch_manager: Which queries are generated together, one batch after another. None lets the engine compute all
            queries together, as they come.
        pipe_size: Batches that are in a pipeline at once; for one stage of no effect.
        queue_size: The most queries that wait; 0 for any number.
        **model_kwargs: Arguments of `model_fn`.

    Returns:
        The engine, with `submit`, `wait` and `shutdown`.

    Raises:
        UnsupportedError: There is more than one rank, or the model is none that the engine can generate with.

    Communication: none; there is one rank.

    Source: the documented OPT service.

    Example:
        >>> from transformers import OPTConfig, OPTForCausalLM
        >>> from colossal.inference import launch_engine
        >>> config = OPTConfig(hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)
        >>> launched = launch_engine(1, 1, "localhost", 29401, 29402, lambda: OPTForCausalLM(config))
        >>> launched.engine.config.max_input_len
        1024
        >>> launched.shutdown()
    """
    if (tp_world_size, pp_world_size) != (1, 1):
        raise UnsupportedError(
            f"launch_engine starts no other processes. Found tp_world_size={tp_world_size} and pp_world_size="
            f"{pp_world_size}. Run `colossal serve DIR --tp {tp_world_size} --pp {pp_world_size}`, or "
            "build an InferenceEngine with tp_size and pp_size on every rank."
        )
    built = model_fn(**model_kwargs)
    if isinstance(built, InferenceEngine):
        return LaunchedEngine(built, batch_manager, queue_size)
    most = 8 if batch_manager is None else batch_manager.max_batch_size
    config = fit_config(built.config, InferenceConfig(max_batch_size=most))
    return LaunchedEngine(InferenceEngine(built.eval(), inference_config=config), batch_manager, queue_size)
