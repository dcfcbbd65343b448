"""The forward pass of a boosted model in pipeline stages, whose logits all ranks get."""

from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn

from colossal._src.interface import SAVE_AND_GENERATE, model_without_adapters
from colossal._src.pipeline import RowExecutor
from colossal.errors import UnsupportedError


@final
class StagedForward:
    """Calls the stages of a rank as a model of transformers is called.

    Attributes:
        parts: The modules of its stages, in order.
        mesh: On whose pp axis they are.
        has_head: Whether the last of them is that of the full model.
    """

    def __init__(self, model: Any) -> None:
        stages = list(model.stages)
        if not all(stage.passes_hidden_states_alone for stage in stages):
            raise UnsupportedError(
                "For an engine, hidden states alone pass from one stage of a pipeline to the next. Found a model whose "
                f"stages pass more. {SAVE_AND_GENERATE} Or boost it with pp_size=1."
            )
        self._rows: RowExecutor = model.row_executor()
        self.mesh, self.has_head = self._rows.mesh, self._rows.has_results
        self.parts: tuple[nn.Module, ...] = tuple(model_without_adapters(stage.module) for stage in stages)

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Run the model on tokens, (rows, length).

        Communication: send, pp, of hidden states, and of the logits to each other rank.
        """
        outputs = self._rows(input_ids=input_ids, **arguments)
        if outputs is None:
            rows, length = input_ids.shape
            return SimpleNamespace(logits=self._rows.receive_results(rows, arguments.get("logits_to_keep", length)))
        self._rows.send_results(outputs.logits)
        return outputs
