"""Shards one model by a policy, by its older name."""

from typing import final

from torch import nn

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.shardformer.policy import Policy, read_policy
from colossal._src.shardformer import ShardConfig, ShardFormer
from colossal._src.tensor import ParallelPlan


@final
class ModelSharder:
    """Shards one model; superseded by `colossal.shardformer.ShardFormer`, whose optimize does it.

    Args:
        model: The model, the same on all ranks.
        policy: A `Policy`, or a plan; None for the plan of the model's family.
        shard_config: The options; by default those of `ShardConfig`, with the ambient mesh.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.shardformer import ModelSharder
        >>> from colossal.shardformer import ShardConfig
        >>> from colossal.tensor import ParallelPlan
        >>> from colossal.testing import fake_world
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6))
        >>> with fake_world(2):
        ...     config = ShardConfig(ParallelMesh(tp=2))
        ...     ModelSharder(model, ParallelPlan({"0": "colwise"}), config).shard()
        ...     print(model[0].weight.shape)
        []
        torch.Size([3, 4])
    """

    def __init__(
        self, model: nn.Module, policy: Policy | ParallelPlan | None, shard_config: ShardConfig | None = None
    ) -> None:
        superseded("colossal.shardformer.ModelSharder", "ShardFormer(shard_config).optimize(model, policy)")
        self.model, self.policy, self.shard_config = model, policy, shard_config or ShardConfig()

    def shard(self) -> list[dict[int, nn.Parameter]]:
        """Shard the model, in place.

        Returns:
            The parameters that stages share: none.

        Raises:
            PlanError: The policy, or the plan, does not fit the model.

        Communication: none; its layers communicate when they run.
        """
        policy = self.policy
        plan = read_policy(policy, self.model, self.shard_config.mesh) if isinstance(policy, Policy) else policy
        ShardFormer(self.shard_config).optimize(self.model, plan)
        return []
