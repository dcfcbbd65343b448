"""Shards the model of an engine over ranks, by the tables of its family."""

from typing import Any

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import equal_on_all_ranks, int64_digest
from colossal._src.lazy import lazy_tensors, materialize
from colossal._src.shardformer import FAMILIES, ShardConfig, ShardFormer, plan_of
from colossal.errors import ConfigError, PlanError, UnsupportedError


def shard(model: nn.Module, mesh: ParallelMesh) -> "LogitGatherer":
    """Shard a model in place, and materialize what this rank has of it."""
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    vocabulary = head.weight.shape[0]
    _check_has_plan(model, mesh)
    _check_equal(model, mesh)
    with mesh:
        ShardFormer(ShardConfig(mesh)).optimize(model)
    materialize(model).to(mesh.accelerator.get_current_device())
    return LogitGatherer(mesh, vocabulary)


class LogitGatherer:
    """Joins the logits of the vocabulary entries that each rank has."""

    def __init__(self, mesh: ParallelMesh, vocabulary: int) -> None:
        self._mesh = mesh
        self._vocabulary = vocabulary

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of all entries, (..., vocabulary), on all ranks."""
        logits = logits.as_subclass(torch.Tensor)
        if logits.shape[-1] == self._vocabulary:
            return logits
        return comm.gather(logits, "tp", -1, self._mesh, length=self._vocabulary)


def _check_has_plan(model: nn.Module, mesh: ParallelMesh) -> None:
    """Reject a model of a family that nothing says how to shard."""
    try:
        plan_of(model)
    except PlanError as error:
        raise UnsupportedError(
            f"Ranks shard a model by the table of its family, or by the plan of its configuration. Found "
            f"{type(model).__name__} with tp_size={mesh.size('tp')}, which has neither. Pass tp_size=1; there are "
            f"tables for {', '.join(FAMILIES)}."
        ) from error


def _check_equal(model: nn.Module, mesh: ParallelMesh) -> None:
    """Reject a model whose parameters differ between ranks: each shards its own."""
    if next(lazy_tensors(model), None) is not None:
        return
    parameters = dict(model.named_parameters())
    equal = equal_on_all_ranks([int64_digest(each) for each in parameters.values()], [mesh.group("tp")])
    if different := [name for name, is_equal in zip(parameters, equal, strict=True) if not is_equal]:
        raise ConfigError(
            f"Each rank shards the same model. Found that {different[0]} differs between ranks. Pass the directory of "
            "a model, or set the same seed before it is built."
        )
