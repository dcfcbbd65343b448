"""DoRA with linear layers that are sharded over tp; imported where peft is."""

from typing import Any, cast, final

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal._src.nn.layer.tp import RowParallel, make_param_shard
from colossal._src.tensor import Layout


def is_dora(variant: object) -> bool:
    """Whether a variant of LoRA is DoRA of a linear layer."""
    return type(variant) is DoraLinearVariant


@final
class ShardedDora(DoraLinearLayer):
    """The magnitudes of the rows of a weight, each divided by the norm of its row.

    Where tp shards the rows, a rank has the magnitudes of its rows; where it shards the columns, all ranks have all
    magnitudes, and squares are summed up over ranks.

    Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024, https://arxiv.org/abs/2402.09353.

    Communication: all_reduce, tp, a number for each row, where the columns are sharded.
    """

    def __init__(self, native: nn.Module, layer: Any, lora_b: nn.Module, mesh: ParallelMesh) -> None:
        super().__init__(cast("DoraLinearLayer", native).fan_in_fan_out)
        self.weight = native.get_parameter("weight")
        self._squares = Channel("tp", mesh) if isinstance(layer.product, RowParallel) else None
        if self._squares is None:
            rows: Layout = cast("Any", lora_b).layouts["weight"]
            layout = Layout(
                rows.shape[:1], rows.ranks, rows.grid, rows.dims[:1], groups=rows.groups[:1], axes=rows.axes
            )
            self.weight = make_param_shard(self.weight, layout, mesh)

    def get_lora_weight(self, lora_A: nn.Linear, lora_B: nn.Linear, adapter_name: str | None = None) -> torch.Tensor:  # noqa: N803, ARG002 (as peft names them)
        """Multiply the local shards: a pass of the identity through the layers would communicate."""
        return lora_B.weight @ lora_A.weight

    def get_weight_norm(
        self,
        weight: torch.Tensor,
        lora_weight: torch.Tensor,
        scaling: float,
        adapter_name: str | None = None,  # noqa: ARG002 (as peft calls it)
    ) -> torch.Tensor:
        """Compute the norms of the rows that this rank has."""
        full = (weight.mT if self.fan_in_fan_out else weight) + scaling * lora_weight
        if self._squares is None:
            return torch.linalg.vector_norm(full, dim=1).to(weight.dtype)
        return self._squares.all_reduce(full.detach().square().sum(1)).sqrt().to(weight.dtype)

    def forward(
        self,
        x: torch.Tensor,
        *,
        base_layer: Any,
        base_result: torch.Tensor | None = None,
        **adapter: Any,
    ) -> torch.Tensor:
        """Compute what is added to the result of the layer."""
        if base_result is None:  # of inputs after dropout: from peft's own product, a rank's sum would be a partial one
            base_result = base_layer(x)
        added: torch.Tensor = super().forward(x, base_layer=base_layer, base_result=base_result, **adapter)
        return added
