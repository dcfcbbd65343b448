"""One stage of a pipeline, as a module."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from colossal._src.pipeline.execution_sequence import ExecutionSequence, extract_sequence_stage
from colossal._src.pipeline.placeholders import StageBoundary, StageEnd
from colossal._src.pipeline.schedule.stage_placement import SharedParameter
from colossal._src.pipeline.stage_extraction import extract_stage
from colossal._src.tensor import Stages, unwrap_adapters
from colossal.errors import PlanError

StageOutput = torch.Tensor | tuple[torch.Tensor, ...]
"""What one stage hands to the next."""


@final
class Stage(nn.Module):
    """One stage of a model."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        passage: StageBoundary | None = None,
        shared: Sequence[SharedParameter] = (),
        arguments: Callable[["StageOutput | None", Any], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.index, self.num_stages, self.shared = index, num_stages, tuple(shared)
        self._passage, self._arguments = passage, arguments
        self._signature = inspect.signature(unwrap_adapters(module).forward)

    @classmethod
    def of_model(cls, model: nn.Module, stages: Stages, layers: Sequence[range], index: int) -> "Stage":
        """Extract a stage of a model whose family has a plan."""
        if len(layers) == 1:
            return cls(model, index, num_stages=1, passage=StageBoundary())
        passage, shared = extract_stage(model, stages, layers, index)
        return cls(model, index, len(layers), passage, shared)

    @classmethod
    def of_sequential(cls, model: nn.Sequential | ExecutionSequence, layers: Sequence[range], index: int) -> "Stage":
        """Extract a stage of a sequence of modules."""
        shared = extract_sequence_stage(model, layers, index)
        return cls(model, index, len(layers), shared=shared)

    @property
    def is_first(self) -> bool:
        """Whether it takes the inputs of the full model."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the outputs of the full model."""
        return self.index == self.num_stages - 1

    @property
    def passes_hidden_states_alone(self) -> bool:
        """Whether one tensor comes from the stage before, and one goes to the next."""
        passage = self._passage
        return passage is not None and max(len(passage.input_names), len(passage.output_names)) <= 1

    def set_sequence_parallel_size(self, num_ranks: int) -> None:
        """Set the number of ranks over which hidden states are sharded along the sequence."""
        if self._passage is not None:
            self._passage.sequence_parallel_size = num_ranks

    def forward(self, carry: StageOutput | None, inputs: Any) -> Any:
        """Run the stage."""
        if self._arguments is not None:
            args, kwargs = self._arguments(carry, inputs)
            return self.module(*args, **kwargs)
        if self._passage is None and carry is not None:
            return self.module(carry)
        args, kwargs = model_arguments(self._signature, inputs)
        if self._passage is None:
            return self.module(*args, **kwargs)
        self._passage.enter(carry)
        try:
            outputs = self.module(*args, **kwargs)
        except StageEnd as end:
            return end.carry[0] if len(end.carry) == 1 else end.carry
        except Exception as error:
            if (explained := self._passage.explain(error)) is error:
                raise
            raise explained from error
        finally:
            # Also after an error: hidden states would be kept until the next pass.
            self._passage.enter(None)
        if not self.is_last:
            raise PlanError(
                "A forward pass calls all layers of its model, in their order. Found that "
                f"{type(self.module).__name__} left out the first layer of the stage after stage {self.index}. Turn "
                "off what leaves layers out, such as layerdrop."
            )
        return outputs


def model_arguments(signature: inspect.Signature, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Find what a model takes of a batch."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if isinstance(inputs, Mapping):
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        return (), {name: value for name, value in inputs.items() if takes_all or name in signature.parameters}
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return tuple(inputs), {}
    # Only what the model requires: the rest of a tuple, such as targets, is for the criterion.
    number = sum(
        parameter.default is inspect.Parameter.empty
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )
    return tuple(inputs[: max(number, 1)]), {}
