"""Leaves each rank its shard of the model of an engine, by the tables of its family."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import equal_on_all_ranks, int64_digest
from colossal._src.lazy import lazy_tensors, materialize
from colossal._src.pipeline import RowExecutor, Stage, StagePlacement, count_layers, partition_uniform
from colossal._src.shardformer import FAMILIES, ShardConfig, ShardFormer, plan_of
from colossal._src.tensor import ParallelPlan, base_model_of
from colossal.errors import ConfigError, PlanError, UnsupportedError


@final
class ModelShard:
    """What a rank has of a model: shards of the layers of its stage.

    Attributes:
        forward: Runs it; what it returns has the vocabulary entries of this rank, and before the last stage is None.
    """

    def __init__(
        self, forward: Callable[..., Any], stages: RowExecutor | None, mesh: ParallelMesh, vocabulary: int
    ) -> None:
        self.forward, self._stages = forward, stages
        self._mesh, self._vocabulary = mesh, vocabulary

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """On the last stage: gather logits of all entries, (..., vocabulary), which the first rank gets as well."""
        logits = logits.as_subclass(torch.Tensor)
        if logits.shape[-1] != self._vocabulary:
            logits = comm.gather(logits, "tp", -1, self._mesh, length=self._vocabulary)
        if self._stages is not None:
            self._stages.send_results(logits)
        return logits

    def receive_logits(self, num_rows: Sequence[int]) -> list[torch.Tensor]:
        """Wait for logits of batches, in their order, (rows, vocabulary) each; nothing where there are none to come."""
        if self._stages is None or not self._stages.wants_results:
            return []
        return [self._stages.receive_results(rows) for rows in num_rows]


def shard(model: nn.Module, mesh: ParallelMesh) -> ModelShard:
    """Shard a model in place, and materialize what this rank has of it."""
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    vocabulary = head.weight.shape[0]
    plan = _find_plan(model, mesh)
    _check_equal(model, mesh)
    stages = None
    if mesh.size("pp") > 1:
        stages = _partition(model, plan, mesh)
        plan = plan.for_stage()
    with mesh:
        ShardFormer(ShardConfig(mesh)).shard(model, plan)
    materialize(model).to(mesh.accelerator.get_current_device())
    return ModelShard(model if stages is None else stages, stages, mesh, vocabulary)


def _partition(model: nn.Module, plan: ParallelPlan, mesh: ParallelMesh) -> RowExecutor:
    """Leave a model the stage of this rank."""
    if plan.stages is None or any(plan.stages.layer_outputs[1:]):
        raise UnsupportedError(
            "Hidden states alone pass from one stage of a pipeline to the next, as the table of a family says. Found "
            f"{type(model).__name__} with pp_size={mesh.size('pp')}, whose plan has no such stages. Pass pp_size=1 and "
            f"tp_size={mesh.size('tp') * mesh.size('pp')}."
        )
    if mesh.size("tp") > 1:
        list(plan.rows(base_model_of(model)))  # a row that matches nothing is an error of the full model
    size, rank = mesh.size("pp"), mesh.rank("pp")
    stage = Stage.of_model(model, plan.stages, partition_uniform(count_layers(model, plan.stages), size), rank)
    # the ranks behind the first one of a tensor-parallel group sample nothing
    return RowExecutor([stage], StagePlacement(size), mesh, receivers=[0] if mesh.rank("tp") == 0 else [])


def _find_plan(model: nn.Module, mesh: ParallelMesh) -> ParallelPlan:
    """Reject a model of a family that nothing says how to shard."""
    try:
        return plan_of(model)
    except PlanError as error:
        raise UnsupportedError(
            f"Ranks shard a model by the table of its family, or by the plan of its configuration. Found "
            f"{type(model).__name__} with tp_size={mesh.size('tp')} and pp_size={mesh.size('pp')}, which has neither. "
            f"Pass 1 for both; there are tables for {', '.join(FAMILIES)}."
        ) from error


def _check_equal(model: nn.Module, mesh: ParallelMesh) -> None:
    """Reject a model whose parameters differ between ranks: each shards its own."""
    if next(lazy_tensors(model), None) is not None:
        return
    parameters = dict(model.named_parameters())
    digests = [int64_digest(each) for each in parameters.values()]
    equal = equal_on_all_ranks(digests, [mesh.group("tp"), mesh.group("pp")])
    if different := [name for name, is_equal in zip(parameters, equal, strict=True) if not is_equal]:
        raise ConfigError(
            f"Each rank shards the same model. Found that {different[0]} differs between ranks. Pass the directory of "
            "a model, or set the same seed before it is built."
        )
