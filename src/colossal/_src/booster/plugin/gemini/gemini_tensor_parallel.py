"""Tensor parallelism before a model is put into chunks."""

from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from colossal._src.booster.plugin.hybrid.stage_sharding import mark_replicas, rebind_to_stages
from colossal._src.booster.plugin.replica_sync import broadcast_initial_values
from colossal._src.cluster import ParallelMesh
from colossal._src.pipeline import Stage
from colossal._src.shardformer import ShardConfig, ShardFormer
from colossal._src.tensor import parameter_names, placement_of


def shard_model(model: nn.Module, optimizer: Optimizer | None, config: ShardConfig, mesh: ParallelMesh) -> None:
    """Shard a model over tp, and apply the options of a configuration; in place.

    Communication: broadcast, tp and dp, the model's bytes: all ranks start from the values of the first.
    """
    is_sharded = any(placement_of(parameter).is_compute_sharded for parameter in model.parameters())
    if is_sharded or mesh.size("tp") == 1:
        config = replace(config, enable_tensor_parallelism=False)
    names = parameter_names(model)
    if config.enable_tensor_parallelism:
        # before the model is sharded: afterwards the ranks of tp hold different values by design
        broadcast_initial_values(model, mesh)
    ShardFormer(config).shard(model)
    if config.enable_tensor_parallelism:
        mark_replicas(model.parameters(), mesh)
    if optimizer is not None:
        rebind_to_stages(optimizer, names, [Stage(model, 0, 1)])
