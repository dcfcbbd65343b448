"""Policies of a user for ShardFormer, and layers and losses that are sharded over a group, by their older names."""

from colossal._src.legacy.shardformer.cross_entropy import (
    cross_entropy_1d,
    dist_cross_entropy,
    dist_log_prob,
    dist_log_prob_1d,
)
from colossal._src.legacy.shardformer.group_dropouts import DropoutForParallelInput, DropoutForReplicatedInput
from colossal._src.legacy.shardformer.group_layers import (
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    GroupEmbedding,
    GroupLinearCol,
    GroupLinearRow,
    GroupVocabEmbedding,
    VocabParallelLMHead1D,
)
from colossal._src.legacy.shardformer.model_sharder import ModelSharder
from colossal._src.legacy.shardformer.policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    read_policy,
)
from colossal._src.legacy.shardformer.replicated_layers import (
    GPT2FusedLinearConv1D,
    LinearWithGradAccum,
    NormOfModule,
    PaddingEmbedding,
    PaddingLMHead,
)
from colossal._src.legacy.shardformer.sequence_exchange import all_to_all_comm

__all__ = [
    "DropoutForParallelInput",
    "DropoutForReplicatedInput",
    "FusedLinear1D_Col",
    "FusedLinear1D_Row",
    "GPT2FusedLinearConv1D",
    "GPT2FusedLinearConv1D_Col",
    "GPT2FusedLinearConv1D_Row",
    "GroupEmbedding",
    "GroupLinearCol",
    "GroupLinearRow",
    "GroupVocabEmbedding",
    "LinearWithGradAccum",
    "ModelSharder",
    "ModulePolicyDescription",
    "NormOfModule",
    "PaddingEmbedding",
    "PaddingLMHead",
    "Policy",
    "SubModuleReplacementDescription",
    "VocabParallelLMHead1D",
    "all_to_all_comm",
    "cross_entropy_1d",
    "dist_cross_entropy",
    "dist_log_prob",
    "dist_log_prob_1d",
    "read_policy",
]
