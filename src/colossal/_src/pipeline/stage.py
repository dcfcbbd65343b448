"""One stage of a pipeline, as a module."""

import inspect
from collections.abc import Mapping, Sequence
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
    """One stage of a model.

    Args:
        module: The model, with the layers of other stages removed.
        index: Which stage it is.
        num_stages: How many there are.
        passage: Where hidden states enter and leave; None for a `torch.nn.Sequential`, which takes them as its input.
        shared: The parameters that several stages have.

    Attributes:
        module: The model: parameters have the names that they have in the full model.

    Example:
        >>> import torch
        >>> from colossal._src.pipeline import Stage
        >>> layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> last = Stage.of_sequential(layers, [range(0, 1), range(1, 3)], index=1)
        >>> last(torch.ones(2, 4), inputs=None).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        passage: StageBoundary | None = None,
        shared: Sequence[SharedParameter] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.index, self.num_stages, self.shared = index, num_stages, tuple(shared)
        self._passage = passage
        self._signature = inspect.signature(unwrap_adapters(module).forward)

    @classmethod
    def of_model(cls, model: nn.Module, stages: Stages, layers: Sequence[range], index: int) -> "Stage":
        """Extract a stage of a model whose family has a plan.

        Args:
            model: The full model; layers of other stages are removed in place.
            stages: What the plan says.
            layers: The layers of each stage; if the model has several lists, of all of them one after the other.
            index: The stage to keep.

        Returns:
            The stage.

        Raises:
            PlanError: The plan does not fit the model.
        """
        if len(layers) == 1:
            return cls(model, index, num_stages=1, passage=StageBoundary())
        passage, shared = extract_stage(model, stages, layers, index)
        return cls(model, index, len(layers), passage, shared)

    @classmethod
    def of_sequential(cls, model: nn.Sequential | ExecutionSequence, layers: Sequence[range], index: int) -> "Stage":
        """Extract a stage of a sequence of modules.

        Args:
            model: The full model; modules of other stages are replaced in place.
            layers: The modules of each stage.
            index: The stage to keep.

        Returns:
            The stage.
        """
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

    def set_sequence_parallel_size(self, num_ranks: int) -> None:
        """Set the number of ranks over which hidden states are sharded along the sequence.

        Args:
            num_ranks: Number of ranks, each of which has the same number of tokens.
        """
        if self._passage is not None:
            self._passage.sequence_parallel_size = num_ranks

    def forward(self, carry: StageOutput | None, inputs: Any) -> Any:
        """Run the stage.

        Args:
            carry: What the previous stage returned; None on the first.
            inputs: The inputs of the full model: a mapping is passed by names, a tuple as positional arguments, of
                which the model gets as many as it takes. What the model does not take is for the criterion.

        Returns:
            What the full model returns, on the last stage; else what the next stage takes.

        Raises:
            PlanError: The model came to its end on a stage that is not the last.
        """
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
        finally:
            self._passage.enter(None)
        if not self.is_last:
            raise PlanError(
                "A forward pass calls all layers of its model, in their order. Found that "
                f"{type(self.module).__name__} left out the first layer of the stage after stage {self.index}. Turn "
                "off what leaves layers out, such as layerdrop."
            )
        return outputs


def model_arguments(signature: inspect.Signature, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Find what a model takes of a batch.

    Args:
        signature: That of its forward method.
        inputs: A mapping, which is passed by names, or a tuple, of which it gets as many as it needs.

    Returns:
        Positional arguments, and arguments by name.

    Example:
        >>> import inspect
        >>> from colossal._src.pipeline import model_arguments
        >>> model_arguments(inspect.signature(lambda x, mask=None: x), {"x": 1, "labels": 2})
        ((), {'x': 1})
    """
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if isinstance(inputs, Mapping):
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        return (), {name: value for name, value in inputs.items() if takes_all or name in signature.parameters}
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return tuple(inputs), {}
    number = sum(
        parameter.default is inspect.Parameter.empty
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )
    return tuple(inputs[: max(number, 1)]), {}
