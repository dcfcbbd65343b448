"""Run a batch through the stages of a pipeline."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, host_group
from colossal._src.comm import Channel
from colossal._src.interface import OptimizerWrapper
from colossal._src.pipeline.microbatch import (
    Microbatching,
    lacks_labels,
    map_tensors,
    refuse_loss_without_labels,
    split_batch,
    tensors_in,
)
from colossal._src.pipeline.p2p import RecvQueue, TensorMeta, make_links, peer_pairs, wait
from colossal._src.pipeline.pipeline_step import PipelineStep
from colossal._src.pipeline.row_executor import RowExecutor
from colossal._src.pipeline.schedule import SCHEDULES, GivenSchedule, Pass, PipelineOrder, forward_only, p2p_messages
from colossal._src.pipeline.schedule.stage_placement import PipelineStyle, StagePlacement
from colossal._src.pipeline.stage import Stage
from colossal._src.pipeline.step_error import StepError
from colossal._src.pipeline.tied_gradients import TiedGradientReducer, shared_parameters_of
from colossal._src.pipeline.timeline import Timeline
from colossal._src.tensor import refuse_collected_outputs, refuse_given_cache
from colossal.errors import CommunicationError, ConfigError, ShapeError, UnsupportedError

Criterion = Callable[[Any, Any], torch.Tensor]

_UNFINISHED = 1  # what a rank says instead of its batch after a step that an exception ended
_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@final
class PipelineExecutor:
    """Runs the passes of its rank in the order of a schedule, and exchanges hidden states and gradients with others.

    All ranks of the pp axis get the same batch: the first stage takes inputs of it, the last one targets, and all of
    them masks and positions.

    Communication: on an accelerator, a group of the pp axis is formed, and 8 bytes go to each rank that this one sends
    to in a step; all ranks of the axis must construct theirs together.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        placement: StagePlacement,
        mesh: ParallelMesh,
        style: PipelineStyle,
        microbatching: Microbatching,
        enable_metadata_cache: bool = True,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        given_schedule: GivenSchedule | None = None,  # in place of that of the style
        full_spec: Any = None,  # with the configuration of the full model, in which programs set flags
        check_length: Callable[[int], None] | None = None,  # refuses numbers of tokens that ranks cannot shard
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self._placement, self._mesh, self._microbatching = placement, mesh, microbatching
        self._links = make_links(mesh, peer_pairs(placement, shared_parameters_of(stages)))
        self._shared = TiedGradientReducer(self.stages, placement, self._links, mesh.rank("pp"))
        self._caches = enable_metadata_cache
        self._known: dict[tuple[int, ...], dict[int, tuple[TensorMeta, ...]]] = {}
        self._parameters = [parameter for stage in stages for parameter in stage.parameters()]
        self._context, self._full_spec, self._check_length = forward_context, full_spec, check_length
        schedule, self._given = given_schedule or SCHEDULES[style], given_schedule
        self._orders = cache(lambda number, trains: (schedule if trains else forward_only)(placement, number))
        self._recorded: list[Pass] | None = None
        self._unfinished: BaseException | None = None  # what ended the last step
        self._step_error = StepError(mesh)

    def __call__(
        self,
        data_iter: Iterator[Any],
        criterion: Criterion,
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the next batch: forward, and backward if there is an optimizer and gradients are enabled.

        Communication: per micro-batch and border between stages, hidden states forward and their gradients back;
        all_gather, pp, 16 bytes, to see that all ranks have the same batch; broadcast, pp, 16 bytes, of the loss.
        """
        trains = optimizer is not None and torch.is_grad_enabled()
        batches, signature, checks_loss = self._next_micro_batches(data_iter, trains)
        orders = self._orders(len(batches), trains)
        # By the shapes of the batch, on which those between stages depend, and by the parameters that are trained, on
        # which it depends whether gradients go back: a program may freeze and thaw layers between steps.
        known = self._known.setdefault(signature, {}) if self._caches else {}
        step = PipelineStep(
            self.stages,
            batches,
            criterion,
            optimizer if trains else None,
            self._links,
            self._recv_queues(orders, known),
            known,
            self._placement,
            any(action.kind == "W" for action in orders[0]),
            return_outputs,
        )
        # Grad mode may be on in an evaluation, where graphs would keep the activations of all micro-batches.
        with self._note_exceptions(), nullcontext() if trains else torch.no_grad():
            self._run(step, orders[self._mesh.rank("pp")])
            if trains:
                assert optimizer is not None
                self._shared.exchange(optimizer.backward_by_grad)
            for link in self._links.values():
                link.drain()
        with self._step_error.explain():
            loss = self._broadcast_loss(step.loss, known) if return_loss or checks_loss else None
        if checks_loss:
            assert loss is not None
            refuse_loss_without_labels(loss)
        return {"loss": loss if return_loss else None, "outputs": step.join_outputs()}

    def row_executor(self) -> RowExecutor:
        """Make what runs the same stages on rows of tokens, forward only, and gives their results to all ranks.

        Communication: as of `make_links`; all ranks of the pp axis call it together.
        """
        receivers = range(self._mesh.size("pp"))
        return RowExecutor(list(self.stages.values()), self._placement, self._mesh, receivers)

    @contextmanager
    def record(self) -> Iterator[list[Timeline]]:
        """Measure when each pass is; when the context ends, the list that it yields has the timeline of all ranks.

        Communication: all_gather, pp, of the passes, when the context ends.
        """
        self._recorded, found = [], []
        try:
            yield found
        finally:
            own, self._recorded = self._recorded, None
        passes: list[Any] = [None] * self._mesh.size("pp")
        dist.all_gather_object(passes, own, group=host_group(self._mesh.group("pp")))
        found.append(Timeline(tuple(each for rank in passes for each in rank)))

    @contextmanager
    def _note_exceptions(self) -> Iterator[None]:
        """Note what ends a step: messages of it are under way then, which the next step would take for its own."""
        try:
            with self._step_error.explain():
                yield
        except BaseException as error:
            self._unfinished = error if self._links else None
            if self._links and not isinstance(error, CommunicationError):
                self._step_error.write(error)
            raise

    def _run(self, step: PipelineStep, order: Sequence[Any]) -> None:
        for action in order:
            begin = self._now()
            with self._context() if action.kind == "F" else nullcontext():
                waited = step.do(action)
            if self._recorded is not None:
                self._recorded.append(Pass(self._mesh.rank("pp"), action, begin + waited, self._now()))

    def _now(self) -> float:
        if self._recorded is not None:
            # Only while passes are recorded: kernels are asynchronous, and waiting for them stops the overlap.
            self._mesh.accelerator.synchronize()
        return time.time()

    def _next_micro_batches(self, data_iter: Iterator[Any], trains: bool) -> tuple[list[Any], tuple[int, ...], bool]:
        """Split the next batch, check that all ranks have the same, and look for micro-batches without labels."""
        batches, signature, lacking, problem = [], 0, False, None
        try:
            if self._unfinished is not None:
                signature = _UNFINISHED
                raise self._unfinished_error(f"this rank ended by {type(self._unfinished).__name__}")
            on_host = next(data_iter)
            batches = split_batch(self._to_device(on_host), self._microbatching)
            if trains or len(batches) > 1:
                lacking = any(lacks_labels(on_host, len(batches)))
            descriptions = [TensorMeta.of(tensor) for tensor in tensors_in(batches[0])]
            text = repr((len(batches), trains, descriptions, self._given)).encode()
            signature = _digest(text)  # 0 stays for ranks without a batch
            self._check_inputs(batches[0])
        except (StopIteration, ConfigError, ShapeError, UnsupportedError, CommunicationError) as error:
            problem = error
        # Reached also by a rank that has no batch: the others would wait for it until the timeout.
        # Negative from ranks that found a micro-batch without labels: then all of them look at the loss.
        trained = _digest(bytes(parameter.requires_grad for parameter in self._parameters))
        own = torch.tensor([-signature if lacking else signature, trained], device="cpu")
        with self._step_error.explain():
            gathered: list[int] = Channel("pp", self._mesh).all_gather(own, dim=0).tolist()
        found = [abs(each) for each in gathered[::2]]
        if problem is not None:
            raise problem
        if _UNFINISHED in found:
            others = [rank for rank, each in enumerate(found) if each == _UNFINISHED]
            raise self._unfinished_error(f"ranks {others} of the pp axis ended by an exception")
        if len(set(found)) > 1:
            others = [rank for rank, each in enumerate(found) if each != signature]
            raise ConfigError(
                "All ranks of a pipeline get the same batch. Found that ranks "
                f"{others} of the pp axis have a batch of other shapes than rank {self._mesh.rank('pp')}, or none"
                f"{'' if self._given is None else ', or another order of passes'}. "
                "Make the dataloader by plugin.prepare_dataloader, or give all of them the same."
            )
        return batches, (signature, *gathered[1::2]), min(gathered) < 0

    @staticmethod
    def _unfinished_error(what: str) -> CommunicationError:
        return CommunicationError(
            "A step of a pipeline needs that all passes of the last one ended: stages would else take its messages for "
            f"those of the next. Found that the last step of {what}. Start again from the last checkpoint, and keep "
            "exceptions out of a step: smaller micro-batches if memory was full."
        )

    def _check_inputs(self, batch: Any) -> None:
        if self._check_length is not None and isinstance(batch, Mapping) and "input_ids" in batch:
            self._check_length(batch["input_ids"].shape[-1])  # the first stage alone would find it
        if self._placement.num_stages > 1:
            models = [self._full_spec, *(stage.module for stage in self.stages.values())]
            found = "Found a model in pipeline stages, each of which has some of the layers."
            advice = "Set it to False, in model.config too, or use a plugin without pp_size."
            refuse_collected_outputs(models, batch, found, advice)
            advice = "Pass all tokens in one batch, or use a plugin without pp_size."
            refuse_given_cache(batch, found, advice)

    def _to_device(self, batch: Any) -> Any:
        device = self._mesh.accelerator.get_current_device()
        return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))

    def _recv_queues(self, orders: PipelineOrder, known: dict[int, tuple[TensorMeta, ...]]) -> dict[int, RecvQueue]:
        own = self._mesh.rank("pp")
        return {
            rank: RecvQueue(link, p2p_messages(orders, self._placement, rank, own), known)
            for rank, link in self._links.items()
        }

    def _broadcast_loss(self, loss: torch.Tensor | None, known: dict[int, tuple[TensorMeta, ...]]) -> torch.Tensor:
        """Let all ranks know the loss, in the dtype that it had on the last stage when such a batch came first."""
        last = self._placement.num_stages - 1
        source = self._placement.rank_of(last)
        if self._mesh.size("pp") == 1:
            assert loss is not None
            return loss
        # float64 holds every loss without rounding; its dtype is sent too, as only the last stage knows it.
        payload = torch.zeros(2, dtype=torch.float64, device=self._mesh.accelerator.get_current_device())
        if loss is not None:
            payload[0], payload[1] = loss, _LOSS_DTYPES.index(loss.dtype)
        wait(Channel("pp", self._mesh).start_broadcast(payload, source))
        if last not in known:  # reading makes the host wait for the device
            known[last] = (TensorMeta((), _LOSS_DTYPES[int(payload[1])], False),)
        return payload[0].to(known[last][0].dtype)


def _digest(text: bytes) -> int:
    """Return 7 bytes, which fit into a signed 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
