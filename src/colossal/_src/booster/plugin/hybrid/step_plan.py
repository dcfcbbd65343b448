"""What a rank is going to hold and to send, found out without memory for the model and without the other ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from colossal._src.amp import cast_model
from colossal._src.booster.plugin.ddp.ddp_comm_hooks import ddp_comm_bytes
from colossal._src.booster.plugin.hybrid.dry_run import LiveBytes, PassMemory, dry_run, peak_activations, run_pass
from colossal._src.booster.plugin.hybrid.hybrid_assembly import Assembly, build
from colossal._src.booster.plugin.hybrid.hybrid_parallel import HybridParallelPlugin
from colossal._src.booster.plugin.hybrid.meta_autocast import MetaAutocast
from colossal._src.booster.plugin.hybrid.pipelined_model import GradientAverager
from colossal._src.booster.plugin.hybrid.stage_sharding import stage_inputs
from colossal._src.cluster import AXES, Axis
from colossal._src.comm import CommCounter, count_collective
from colossal._src.interface import OptimizerWrapper
from colossal._src.pipeline import PipelineOrder, map_tensors, p2p_messages, split_batch
from colossal._src.tensor import DATA, group_by_replicas, placement_of
from colossal._src.zero import ZeroShards
from colossal.errors import ConfigError, MeshError, UnsupportedError

_META = torch.device("meta")
_EXPERT_AXES: tuple[Axis, ...] = ("ep", "edp")


@final
@dataclass(frozen=True)
class StepPlan:
    """What one rank of `HybridParallelPlugin` holds, and what it sends in a step.

    Args:
        coordinate: Its place on each axis of the mesh.
        num_parameters: Elements of the parameters that it has.
        num_replicated_parameters: How many of them all ranks of the tp axis have.
        parameter_bytes: Parameters and buffers, as the model computes with them.
        gradient_bytes: Gradients, after the backward pass.
        optimizer_bytes: Master weights and optimizer states, of its shard of the parameters.
        activation_bytes: What its stages keep for backward passes, at most.
        num_in_flight: Forward passes whose backward pass is to come, at most.
        num_microbatches: Micro-batches of a step.
        working_bytes: Temporary memory while one micro-batch passes a stage.
        sent_bytes: What it sends in a step, by the axis.
        num_calls: Collectives and messages that it begins in a step, by the axis.

    Example:
        >>> from colossal.booster.plugin import StepPlan
        >>> plan = StepPlan({"tp": 0}, 10, 2, 20, 20, 120, 40, 2, 8, 20, {"tp": 100}, {"tp": 4})
        >>> plan.peak_bytes
        220
    """

    coordinate: Mapping[Axis, int]
    num_parameters: int
    num_replicated_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    num_in_flight: int
    num_microbatches: int
    working_bytes: int
    sent_bytes: Mapping[Axis, int]
    num_calls: Mapping[Axis, int]

    @property
    def peak_bytes(self) -> int:
        """What the rank holds at most, without what libraries and allocators take for themselves."""
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.activation_bytes + self.working_bytes

    def __str__(self) -> str:
        """A row for each kind of memory, and one for each axis."""
        rows = {
            f"parameters: {self.num_parameters:,} elements": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "master weights and optimizer states": self.optimizer_bytes,
            f"activations: {self.num_in_flight} passes of {self.num_microbatches} micro-batches": self.activation_bytes,
            "for a moment": self.working_bytes,
            "at most": self.peak_bytes,
        }
        for axis, number in self.sent_bytes.items():
            rows[f"sent in a step along {axis}: {self.num_calls[axis]:,} calls"] = number
        place = ", ".join(f"{axis}={index}" for axis, index in self.coordinate.items())
        return "\n".join([place, *(f"  {name:<48}{number / 1e9:>10,.3f} GB" for name, number in rows.items())])


def plan_step(
    plugin: HybridParallelPlugin,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    criterion: Callable[[Any, Any], torch.Tensor],
    *,
    autocast: torch.dtype | None = None,
) -> StepPlan:
    """Compute what this rank of a fake process group would hold, and send in a step.

    The model is split, sharded and given its optimizer as `Booster.boost` does it. One micro-batch passes the stages of
    the rank, forward and backward, and the optimizer makes a step, all on the meta device, where tensors have shapes
    but no elements. What is kept and sent meanwhile is counted, and multiplied as the schedule of the pipeline has it.
    Attention is taken to be computed without a matrix of scores, as fast kernels do, and tokens to be routed to all
    experts evenly; a rank whose experts get more holds and sends more. What a norm of gradients and the
    agreement of ranks send, a few bytes, is left out.

    Args:
        plugin: A new one; it belongs to this rank from now on.
        model: As for one process, built inside of ``torch.device("meta")``; changed in place.
        optimizer: Of its parameters; changed in place.
        batch: What one data-parallel rank gets for a step, on any device: only shapes and dtypes matter.
        criterion: Takes the outputs and the inputs of a micro-batch, returns its loss.
        autocast: What `torch.autocast` computes products of matrices in, as DDP and FSDP have it in half precision,
            beside the float32 model of ``precision="fp32"``.

    Returns:
        The plan of this rank.

    Raises:
        MeshError: The process group is not a fake one, or the sizes do not fit its world size.
        ConfigError: The plugin is another one, the model has values, or the batch does not divide.
        PlanError: The plan of the model's family does not fit the model.
        UnsupportedError: The model or the optimizer cannot be sharded, sequences are sharded, or experts are not
            computed by grouped_mm in bf16.

    Communication: none: the process group is a fake one.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from colossal.booster.plugin import HybridParallelPlugin, plan_step
        >>> from colossal.testing import fake_world
        >>> ids = torch.zeros(8, 1024, dtype=torch.int64)
        >>> with fake_world(64):
        ...     with torch.device("meta"):
        ...         model = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     plugin = HybridParallelPlugin(tp_size=4, pp_size=2, precision="bf16", zero_stage=1, microbatch_size=1)
        ...     plan = plan_step(plugin, model, optimizer, {"input_ids": ids, "labels": ids}, lambda out, _: out.loss)
        >>> plan.num_microbatches, plan.num_in_flight, plan.gradient_bytes // plan.num_parameters
        (8, 2, 2)
    """
    if not isinstance(given := plugin, HybridParallelPlugin):
        raise ConfigError(
            f"plan_step plans a step of HybridParallelPlugin. Found {type(given).__name__}. Plan HybridParallelPlugin("
            "tp_size=1, pp_size=1, zero_stage=1), or ask `colossal estimate` for any plugin."
        )
    begin: Assembly = plugin.begin(model, optimizer, _META)
    _check(begin)
    full = map_tensors(batch, lambda tensor: tensor.to(_META))
    microbatching = begin.options.microbatching
    microbatches = [full] if microbatching is None else split_batch(full, microbatching)
    return _plan(begin, microbatches, criterion, MetaAutocast(autocast))


def _plan(
    begin: Assembly,
    microbatches: Sequence[Any],
    criterion: Callable[[Any, Any], torch.Tensor],
    casts: MetaAutocast,
) -> StepPlan:
    """Plan a step of these micro-batches."""
    if begin.options.dtype is not None:
        cast_model(begin.model, begin.options.dtype)  # some kernels have no other dtypes
    with dry_run():
        carries = stage_inputs(begin.model, begin.policy, begin.options, begin.mesh, microbatches[0])
    built = build(begin)
    assert built.wrapper is not None
    wrapper = built.wrapper

    def run(live: LiveBytes) -> dict[int, PassMemory]:
        entering = zip(built.stages, carries, strict=True)
        return {
            one.index: run_pass(one, carry, microbatches[0], criterion, wrapper, live, casts.forget_weights)
            for one, carry in entering
        }

    return _measure(built, wrapper, run, len(microbatches), casts)


def _check(begin: Assembly) -> None:
    model, mesh = begin.model, begin.mesh
    if (sharing := begin.options.shard_config(mesh).sequence_parallel_config(mesh)) is not None:
        raise UnsupportedError(
            f"A step is planned whose ranks have full sequences. Found sequence parallelism, mode {sharing.mode!r}, "
            "whose hidden states are not planned yet. Plan without sequence parallelism: with it a rank keeps less."
        )
    backend = dist.get_backend()
    if backend != "fake":
        raise MeshError(
            f"A step is planned in a fake process group. Found one that communicates through {backend}. Plan in one "
            "process, inside of colossal.testing.fake_world(size, rank)."
        )
    named = chain(model.named_parameters(), model.named_buffers())
    if real := [name for name, tensor in named if not tensor.is_meta]:
        raise ConfigError(
            f"A step is planned without values. Found {real[0]}, which has some. Build the model inside of "
            "torch.device('meta')."
        )
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    has_experts = any(map(_has_stacked_experts, model.modules()))
    if has_experts and (implementation != "grouped_mm" or begin.options.dtype != torch.bfloat16):
        raise UnsupportedError(
            "A step is planned of experts whose shapes do not depend on where tokens are routed to, as grouped_mm "
            f"computes them in bf16. Found a {type(model).__name__} with experts_implementation={implementation!r} and "
            f"the dtype {begin.options.dtype}. Call model.set_experts_implementation('grouped_mm'), and pass "
            "precision='bf16'."
        )


def _has_stacked_experts(module: nn.Module) -> bool:
    """Whether a module has a matrix for each expert in one parameter."""
    number = getattr(module, "num_experts", None)
    shapes = [tuple(each.shape) for each in module.parameters(recurse=False)]
    return isinstance(number, int) and any(shape[:-2] == (number,) for shape in shapes)


@final
class _CommVolume:
    """What a rank sends in a step."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.sent, self.calls = dict.fromkeys(axes, 0), dict.fromkeys(axes, 0)

    def add(self, axis: Axis, num_bytes: int, calls: int = 1) -> None:
        """Add some."""
        if calls:
            self.sent[axis] += num_bytes
            self.calls[axis] += calls

    def add_counted(self, counter: CommCounter, times: Mapping[Axis, int]) -> None:
        """Add what was counted; along some axes that happens several times."""
        for (op, axis), calls in counter.calls.items():
            number = times.get(axis, 1)
            self.add(axis, counter.bytes[op, axis] * number, calls * number)

    def add_messages(self, passes: Mapping[int, PassMemory], built: Assembly, orders: PipelineOrder) -> None:
        """Add hidden states, their gradients, and gradients of parameters that are on several ranks."""
        placement, pp_rank = built.options.placement, built.mesh.rank("pp")
        for target in range(built.mesh.size("pp")):
            for message in p2p_messages(orders, placement, pp_rank, target) if target != pp_rank else ():
                one = passes[message.stage + 1 if message.is_grad else message.stage]
                self.add("pp", one.input_bytes if message.is_grad else one.output_bytes)
        for stage in built.stages:
            for shared in stage.shared:
                here = [index for index in shared.stages if index in passes]
                others = {*shared.ranks(placement)} - {pp_rank}
                if here[:1] == [stage.index]:
                    tied = stage.module.get_parameter(shared.names[shared.stages.index(here[0])])
                    self.add("pp", tied.nbytes * len(others), len(others))


def _measure(
    built: Assembly,
    optimizer: OptimizerWrapper,
    run: Callable[[LiveBytes], Mapping[int, PassMemory]],
    number: int,
    casts: MetaAutocast,
) -> StepPlan:
    """Run a micro-batch through the stages of this rank, and a step of the optimizer."""
    mesh, options, stages, masters = built.mesh, built.options, built.stages, optimizer.masters
    axes = (*AXES, *(_EXPERT_AXES if mesh.size("ep") > 1 else ()))
    traffic = _CommVolume([axis for axis in axes if mesh.size(axis) > 1])
    with dry_run() as live, casts, CommCounter() as counter:
        with nullcontext() if masters is None else masters.backward_pass():
            run(live)
        gradient_bytes = live.now
        # tp and ep communicate in every micro-batch, the other axes once in a step
        traffic.add_counted(counter, {"tp": number, "ep": number})
        passes = run(live)  # again, as gradients have their room now
    with CommCounter() as counter:
        _update(optimizer, built)
    traffic.add_counted(counter, {})
    orders = options.schedule(options.placement, number)
    traffic.add_messages(passes, built, orders)
    kept, under_way = peak_activations(
        orders[mesh.rank("pp")], {index: one.activation_bytes for index, one in passes.items()}
    )
    parameters = {parameter for stage in stages for parameter in stage.parameters()}
    working = _storages(each for stage in stages for each in (*stage.parameters(), *stage.buffers()))
    states = _storages([*optimizer.parameters, *tree_leaves(list(optimizer.state.values()))])
    return StepPlan(
        {axis: mesh.rank(axis) for axis in traffic.sent},
        sum(each.numel() for each in parameters),
        sum(each.numel() for each in parameters if not placement_of(each).is_compute_sharded),
        sum(working.values()),
        gradient_bytes,
        sum(size for storage, size in states.items() if storage not in working),
        kept,
        under_way,
        number,
        max(one.working_bytes for one in passes.values()),
        traffic.sent,
        traffic.calls,
    )


def _update(optimizer: OptimizerWrapper, built: Assembly) -> None:
    """Do what a step does with gradients that are there."""
    masters = optimizer.masters
    if isinstance(masters, ZeroShards):
        for bucket in masters.buckets:
            for shard, grad in bucket.grads():
                shard.grad = grad
    else:
        if built.options.pp_size > 1:
            GradientAverager(built.stages, built.replicas, built.options.ddp).average()
        else:
            for replicas, group in group_by_replicas(built.all_stages.parameters(), built.replicas).items():
                if replicas.size > 1:
                    compress_fp8 = built.options.ddp.fp8_communication and replicas.axis == DATA
                    num_bytes = ddp_comm_bytes(group, replicas.size, compress_fp8=compress_fp8)
                    count_collective("all_reduce", replicas.axis, num_bytes)
        if masters is not None:
            masters.copy_grads_to_masters()
    with optimizer.direct_step():
        optimizer.optim.step()
    if masters is not None:
        masters.copy_params_from_masters()


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """The bytes of the storages of tensors."""
    found = (value.untyped_storage() for value in values if isinstance(value, torch.Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}  # noqa: SLF001 (it has no public name)
