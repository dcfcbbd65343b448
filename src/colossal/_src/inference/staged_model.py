"""The stage of a model that a rank computes, between the ranks of the stages before and after it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.pipeline import Stage, make_row_links, partition_uniform
from colossal._src.tensor import Stages


class StagedModel:
    """One stage of each rank of the pp axis: hidden states pass from stage to stage, and logits to the first rank.

    Sends do not wait. So a stage computes the next batch of a step while later ones still compute this one.
    """

    def __init__(self, model: nn.Module, stages: Stages, num_layers: int, mesh: ParallelMesh) -> None:
        size, rank = mesh.size("pp"), mesh.rank("pp")
        self.stage = Stage.of_model(model, stages, partition_uniform(num_layers, size), rank)
        links = make_row_links(mesh, [*((each, each + 1) for each in range(size - 1)), (0, size - 1)])
        self._previous, self._next = links.get(rank - 1), links.get(rank + 1)
        # the ranks behind the first one of a tensor-parallel group sample nothing
        self._first = links.get(0) if self.stage.is_last and mesh.rank("tp") == 0 else None
        self._last = links.get(size - 1) if self.stage.is_first and mesh.rank("tp") == 0 else None

    def forward(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Run the stage on tokens, (rows, length); return what the model returns, or None before the last stage."""
        hidden = None
        if not self.stage.is_first:
            assert self._previous is not None
            hidden = self._previous.receive(*input_ids.shape)
        outputs = self.stage(hidden, {"input_ids": input_ids, **arguments})
        if self.stage.is_last:
            return outputs
        assert self._next is not None
        self._next.send(outputs)
        return None

    def send_logits(self, logits: torch.Tensor) -> None:
        """On the last stage: let the first rank have logits, (rows, vocabulary)."""
        if self._first is not None:
            self._first.send(logits)

    def receive_logits(self, num_rows: Sequence[int]) -> list[torch.Tensor]:
        """Wait for logits of batches, in their order, (rows, vocabulary) each; nothing on all ranks but the first."""
        return [] if self._last is None else [self._last.receive(rows) for rows in num_rows]
