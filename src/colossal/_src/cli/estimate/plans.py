"""What each rank holds and sends under a plugin: `plan_step`, and for FSDP and Gemini what they shard."""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from colossal._src.booster.plugin import HybridParallelPlugin, StepPlan, find_units, plan_step
from colossal._src.cli.estimate.model import ModelSource, loss_of
from colossal._src.cli.estimate.settings import StepSettings
from colossal._src.cluster import fake_world
from colossal._src.zero.gemini import pack_parameters, search_chunk_configuration, unshared_parameters
from colossal.errors import UnsupportedError

_FP32, _HALF = 4, 2
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ADAM_STATES = 2
_CHUNK_RANGE_M, _CHUNK_STEP = 32, 1024  # the defaults of GeminiPlugin


@final
@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """What one rank holds, in bytes, and sends in a step."""

    rank: int
    pp_stage: int
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # optimizer states, and master weights
    buffer_bytes: int  # buckets of gradients, and gathered parameters that are kept
    activation_bytes: int | None  # what backward passes need; None where only weights are known
    temporary_bytes: int | None  # during a pass
    host_bytes: int  # of the above, what is in host memory
    sent_bytes: dict[str, int]  # by axis
    num_calls: dict[str, int]

    @property
    def device_bytes(self) -> int:
        """The most on the device."""
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes
        return states + (self.activation_bytes or 0) + (self.temporary_bytes or 0) - self.host_bytes


def estimate(settings: StepSettings, source: ModelSource) -> list[RankEstimate]:
    """Plan a step on the first rank of each pipeline stage; other ranks of a stage have as much, or less."""
    if not source.has_layers and (settings.tp > 1 or settings.pp > 1):
        raise UnsupportedError(
            f"Layers are split that are known. Found --tp {settings.tp} --pp {settings.pp}, and a directory with "
            "weights alone. Add its config.json."
        )
    if settings.recompute and not source.has_layers:
        raise UnsupportedError(
            "Layers compute their activations again. Found --checkpoint-layers, and a directory with weights alone. "
            "Add its config.json, or leave the option out."
        )
    return [_estimate(settings, source, stage) for stage in range(settings.pp)]


def _estimate(settings: StepSettings, source: ModelSource, stage: int) -> RankEstimate:
    held = _plan(settings, source, stage)
    buckets = held.gradient_bytes if settings.stage_of_zero == 0 and settings.pp == 1 and settings.replicas > 1 else 0
    common = RankEstimate(
        rank=stage * settings.tp,
        pp_stage=stage,
        num_parameters=held.num_parameters,
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=held.gradient_bytes,
        optimizer_bytes=held.optimizer_bytes,
        buffer_bytes=buckets,
        activation_bytes=held.activation_bytes if source.has_layers else None,
        temporary_bytes=held.working_bytes if source.has_layers else None,
        host_bytes=held.optimizer_bytes if settings.offload else 0,
        sent_bytes={str(axis): number for axis, number in held.sent_bytes.items()},
        num_calls={str(axis): number for axis, number in held.num_calls.items()},
    )
    sharded = {"fsdp": _fsdp, "gemini": _gemini}.get(settings.plugin)
    if sharded is None:
        return common
    with torch.device("meta"):
        return sharded(settings, common, source.build())


def _plan(settings: StepSettings, source: ModelSource, stage: int) -> StepPlan:
    """Plan the step of a data-parallel rank, of which ranks of the sp axis are some, each with a part of the tokens."""
    autocast = _HALVES.get(settings.precision) if settings.plugin in ("ddp", "fsdp") else None
    tokens = math.ceil((settings.length or source.length) / settings.sp)
    with fake_world(settings.ranks, stage * settings.tp):
        with torch.device("meta"):
            model: Any = source.build()
        model.train()
        if settings.recompute:
            # transformers renames it: the old name warns in the versions that have the new one
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        plugin = HybridParallelPlugin(
            tp_size=settings.tp,
            pp_size=settings.pp,
            precision="fp32" if autocast else settings.precision,
            zero_stage=settings.stage_of_zero,
            microbatch_size=1 if settings.pp > 1 and settings.num_microbatches is None else None,
            num_microbatches=settings.num_microbatches,
        )
        optimizer = torch.optim.AdamW(model.parameters())
        return plan_step(
            plugin, model, optimizer, source.batch_of(model, settings.samples, tokens), loss_of, autocast=autocast
        )


def _fsdp(settings: StepSettings, common: RankEstimate, model: nn.Module) -> RankEstimate:
    """Shard each parameter along its first dimension; the units of a model are gathered one after the other."""
    size = settings.ranks
    units = [list(unit.parameters()) for unit in find_units(model, None, set())]
    inside = {parameter for unit in units for parameter in unit}
    rest = [parameter for parameter in model.parameters() if parameter not in inside]
    shards = sum(_fsdp_shard(parameter, size) for parameter in model.parameters())
    of_rest = sum(parameter.nbytes for parameter in rest)
    largest = max((sum(parameter.nbytes for parameter in unit) for unit in units), default=0)
    replicated = common.parameter_bytes - sum(parameter.nbytes for parameter in model.parameters())  # buffers
    states = _ADAM_STATES * shards
    # a unit, the next one, and gradients; those of the root unit, which surrounds all others, are there until the end
    gathered = (2 * of_rest + 3 * largest) if size > 1 else 0
    return replace(
        common,
        parameter_bytes=shards + replicated,
        gradient_bytes=shards,
        optimizer_bytes=states,
        buffer_bytes=0,
        temporary_bytes=None if common.temporary_bytes is None else common.temporary_bytes + gathered,
        host_bytes=2 * shards + states if settings.offload else 0,
        # parameters are gathered in both passes, and gradients are reduced
        sent_bytes={"dp": 3 * (size - 1) * shards} if size > 1 else {},
        num_calls={"dp": 3 * (len(units) + bool(rest))} if size > 1 else {},
    )


def _fsdp_shard(parameter: nn.Parameter, size: int) -> int:
    """Bytes of the first rank's shard."""
    if parameter.dim() == 0:
        return parameter.nbytes
    return math.ceil(parameter.shape[0] / size) * math.prod(parameter.shape[1:]) * parameter.itemsize


def _gemini(settings: StepSettings, common: RankEstimate, model: nn.Module) -> RankEstimate:
    """Shard chunks of parameters, which are gathered one after the other."""
    size = settings.ranks // settings.tp
    with fake_world(size, 0):
        found, total, wasted = search_chunk_configuration(model, _CHUNK_RANGE_M, _CHUNK_STEP)
    length = found[size]["chunk_size"]
    runs = pack_parameters(model.parameters(), length, separate=unshared_parameters(model, length))
    # with tp the layers are sharded first, and chunks hold what is left
    part = common.num_parameters / total
    longest = max(length, *(sum(each.numel() for each in run) for run in runs))
    full = round(part * longest)
    shard = math.ceil(part * (total + wasted) / size)
    halves = settings.precision != "fp32"
    item = _HALF if halves else _FP32
    states = shard * _FP32 * (_ADAM_STATES + halves)
    replicated = common.parameter_bytes - common.num_parameters * item  # buffers
    sent = dict(common.sent_bytes)
    calls = dict(common.num_calls)
    if size > 1:
        # gathered in both passes, the last chunk only once: the backward pass begins with it
        last = math.ceil(part * longest / size) if len(runs) > 1 else shard
        sent["dp"], calls["dp"] = (size - 1) * (3 * shard - last) * item, 3 * len(runs) - 1
    return replace(
        common,
        parameter_bytes=shard * item + replicated,
        gradient_bytes=shard * _FP32,  # summed in 16 bits, kept in those of the master weights
        optimizer_bytes=states,
        buffer_bytes=full * item if size > 1 else 0,
        temporary_bytes=None if common.temporary_bytes is None else common.temporary_bytes + full * item,
        host_bytes=shard * (item + _FP32) + states if settings.offload else 0,
        sent_bytes=sent,
        num_calls=calls,
    )
