"""Blocks of experts of Hugging Face models over ranks, by the older names: a block keeps its forward method."""

from typing import Any, Self

from torch import distributed as dist
from torch import nn

from colossal._src.cluster import ParallelMesh, ambient_mesh
from colossal._src.legacy.notice import superseded
from colossal._src.nn.moe import shard_experts
from colossal.errors import ConfigError, MeshError, UnsupportedError


class _ExpertParallelBlock(nn.Module):
    """What a block of a Hugging Face model is in addition to its own class, once ranks have some of its experts."""

    def __init__(self) -> None:
        raise UnsupportedError(
            f"A block of a model becomes a {type(self).__name__}. Found a call of the class. Pass the block to its "
            "from_native_module."
        )

    @classmethod
    def from_native_module(
        cls,
        module: nn.Module,
        tp_group: dist.ProcessGroup | None = None,
        moe_dp_group: dist.ProcessGroup | None = None,
        ep_group: dist.ProcessGroup | None = None,
        fp8_communication: bool = False,
        use_zbv: bool = False,
    ) -> Self:
        """Give each rank some experts of a block, in place.

        The block takes and returns what it did. Its gradients are those of this rank's tokens, and of an expert those
        of the tokens of all ranks of `ep_group`; boost averages all of them.

        Args:
            module: The block, the same on all ranks; `experts` are its experts, with stacked weights.
            tp_group: Ranks that have the same tokens, of which each sends a part to the experts.
            moe_dp_group: The ranks that have the same experts.
            ep_group: The ranks that have different ones; by default those of the mesh in force.
            fp8_communication: Only False.
            use_zbv: No effect: the schedule of a pipeline delays the gradients of weights, of any layer.

        Returns:
            The block.

        Raises:
            ConfigError: It has no experts.
            MeshError: The groups are those of no mesh.
            PlanError: The ranks do not divide the experts, or their weights are not stacked.
            UnsupportedError: `fp8_communication` is True.

        Communication: groups may be formed. A forward pass all_to_all, ep, as of `colossal.nn.moe.dispatch` and
        `colossal.nn.moe.combine`.
        """
        del use_zbv
        if fp8_communication:
            raise UnsupportedError(
                "Tokens go to experts in the dtype of the model. Found fp8_communication=True. Leave it out, or pass "
                "it to a plugin, which then reduces gradients in 8 bits."
            )
        superseded(f"{cls.__name__}.from_native_module", "HybridParallelPlugin(..., ep_size=...)")
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module):
            raise ConfigError(
                f"A block of experts has them as `experts`. Found {type(module).__name__}, which has none. Pass the "
                "block of a model of transformers, such as model.layers[0].mlp."
            )
        shard_experts(experts, _mesh_of(tp_group, moe_dp_group, ep_group))
        block: Any = module
        block.__class__ = type(cls.__name__, (cls, type(module)), {})
        return block


class EPMixtralSparseMoeBlock(_ExpertParallelBlock):
    """A block of experts of Mixtral over ranks; ``from_native_module`` makes it.

    Example:
        >>> from transformers import MixtralConfig
        >>> from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.moe import EPMixtralSparseMoeBlock
        >>> from colossal.testing import fake_world
        >>> block = MixtralSparseMoeBlock(MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4))
        >>> with fake_world(2), ParallelMesh(ep=2) as mesh:
        ...     block = EPMixtralSparseMoeBlock.from_native_module(block, ep_group=mesh.group("ep"))
        >>> isinstance(block, EPMixtralSparseMoeBlock), block.experts.num_experts
        (True, 2)
    """


class EPDeepseekMoE(_ExpertParallelBlock):
    """A block of experts of DeepSeek over ranks; ``from_native_module`` makes it.

    Example:
        >>> from transformers import DeepseekV2Config
        >>> from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.moe import EPDeepseekMoE
        >>> from colossal.testing import fake_world
        >>> sizes = dict(hidden_size=32, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1)
        >>> block = DeepseekV2Moe(DeepseekV2Config(**sizes))
        >>> with fake_world(2), ParallelMesh(ep=2):
        ...     EPDeepseekMoE.from_native_module(block).experts.num_experts
        2
    """


class EpDeepseekV3MoE(_ExpertParallelBlock):
    """A block of experts of DeepSeek-V3 over ranks; ``from_native_module`` makes it.

    Example:
        >>> from transformers import DeepseekV3Config
        >>> from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.moe import EpDeepseekV3MoE
        >>> from colossal.testing import fake_world
        >>> sizes = dict(hidden_size=8, moe_intermediate_size=16, n_routed_experts=16, n_shared_experts=1)
        >>> block = DeepseekV3MoE(DeepseekV3Config(**sizes))
        >>> with fake_world(2), ParallelMesh(ep=2):
        ...     EpDeepseekV3MoE.from_native_module(block).experts.num_experts
        8
    """


def _mesh_of(
    tp_group: dist.ProcessGroup | None, moe_dp_group: dist.ProcessGroup | None, ep_group: dist.ProcessGroup | None
) -> ParallelMesh:
    """Find the mesh in force, or make one, whose axes are these groups."""
    mesh = ambient_mesh()
    if mesh is None:
        size = 1 if ep_group is None else dist.get_world_size(ep_group)
        mesh = ParallelMesh(tp=1 if tp_group is None else dist.get_world_size(tp_group), ep=size)
    for axis, group in (("tp", tp_group), ("edp", moe_dp_group), ("ep", ep_group)):
        ranks = [*mesh.ranks(axis)]  # type: ignore[arg-type]
        if group is not None and (given := dist.get_process_group_ranks(group)) != ranks:
            raise MeshError(
                f"The groups of a block are those of one mesh, {mesh}, whose {axis} axis has the ranks {ranks} here. "
                f"Found a group of the ranks {given}. Build the block inside `with plugin.mesh:`."
            )
    return mesh
