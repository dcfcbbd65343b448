"""What an engine does without a model: plan steps of its requests, and turn logits into outputs."""

from collections.abc import Mapping

import torch

from colossal._src.inference.chunking import AnyChunks, FixedChunks
from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.pages import PagePool
from colossal._src.inference.preparation import Request
from colossal._src.inference.request_table import RequestId, RequestTable
from colossal._src.inference.requests import RequestOutput, Sequence
from colossal._src.inference.sampling import SampledToken, Sampler
from colossal._src.inference.scheduler import Scheduler, StepPlan
from colossal._src.inference.statistics import EngineStatistics, count
from colossal._src.inference.step_record import StepRecord, StepRecorder
from colossal._src.inference.weights import Weights
from colossal.errors import ConfigError


class EngineCore:
    """The requests of an engine, on the rank that schedules and samples."""

    def __init__(self, config: InferenceConfig, seed: int | None) -> None:
        self.requests = RequestTable()
        self.scheduler = Scheduler(
            PagePool(config.total_blocks, config.block_size),
            FixedChunks(config.chunk_tokens) if config.batch_invariant else AnyChunks(),
            max_batch_size=config.max_batch_size,
            max_tokens=config.step_tokens,
            output_reserve=config.output_reserve,
            shares_prefixes=config.prefix_cache,
        )
        self.sampler = Sampler(seed)
        self._recorder = StepRecorder(config.max_batch_size)
        self._num_steps = 0
        self._num_generated = 0

    @property
    def statistics(self) -> EngineStatistics:
        """What there is, and was done so far."""
        return count(self.scheduler, num_steps=self._num_steps, num_generated=self._num_generated)

    def add(self, request_id: RequestId | None, request: Request) -> RequestId:
        """Let a request wait; without an id it gets a number."""
        found = self.requests.add(request_id, request)
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        return found

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request and free its pages; None if there is none of this id."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._finish(sequence, "abort")
        [output] = self.requests.collect([request_id])
        return output

    def forget_prefixes(self) -> None:
        """Forget the tokens of all pages, unless a request runs."""
        if self.scheduler.running:
            raise ConfigError(
                f"Pages are forgotten while no request runs. Found {len(self.scheduler.running)} that do. Call step "
                "until has_requests is False, or abort them."
            )
        self.scheduler.pool.forget_prefixes()

    def renew(self, weights: Weights) -> None:
        """Forget what older weights have computed; where requests run, one would look at all weights for each more."""
        if not len(self.requests) and weights.have_changed():
            self.forget_prefixes()

    def plan(self) -> tuple[StepPlan, StepRecord]:
        """Choose what the next step computes, and allocate its pages."""
        plan = self.scheduler.plan()
        return plan, self._recorder.record(plan)

    def take(self, plan: StepPlan, logits: Mapping[int, torch.Tensor]) -> list[RequestOutput]:
        """Sample the next tokens from the logits of chunks, by their place in the plan; return what has changed."""
        sampled = self.sampler.sample({plan[place].sequence: row for place, row in logits.items()})
        self.scheduler.advance(plan)
        for sequence, token in sampled.items():
            self._append(sequence, token)
        self._num_steps += bool(plan)
        self._num_generated += len(sampled)
        return self.requests.collect({self.requests.owner(sequence): None for sequence in sampled})

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        """Give a sequence its next token, and end it if that is the last one."""
        stream = self.requests.stream(sequence)
        sequence.outputs.append(sampled.token_id)
        if sampled.logprob is not None:
            sequence.logprobs.append(sampled.logprob)
        stream.add(sampled.token_id)
        reason = sequence.reason_to_finish()
        if reason or stream.stopped:
            self._finish(sequence, "stop" if stream.stopped else reason or "")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)
        self.sampler.forget(sequence)
