"""What stands in a stage for the parts of its model that other stages have.

The forward method of a model still runs from its beginning on every stage, and makes masks and positions of the inputs.
Layers of earlier stages hand over what came from the stage before; the first layer of a later stage ends the pass. What
else earlier stages compute is not here: a forward method that uses it gets no value, and is refused.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from textwrap import shorten
from typing import Any, cast, final

import torch
from torch import nn

from colossal.errors import ColossalError, PlanError

HIDDEN = "hidden_states"
"""The name of what one layer hands to the next."""

RESULT = "result"
"""The name of what a list of layers that has come to its end hands to the next list."""

_RULE = (
    "A pipeline runs the forward method of its model on every stage, where each layer of the list that `Stages` names "
    "takes just what the previous layer has returned."
)
_ELSE = "or build the stages yourself, by colossal.pipeline.StageModules."


class StageEnd(Exception):  # noqa: N818 (it is no error)
    """Ends the forward pass of a stage that is not the last."""

    def __init__(self, carry: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.carry = carry


@final
class StageBoundary:
    """The values that come from the stage before and that go to the next one, during a forward pass."""

    def __init__(self, input_names: Sequence[str] = (), output_names: Sequence[str] = ()) -> None:
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self.values: dict[str, Any] = {}
        self.sequence_parallel_size = 1
        self.is_before_layers = False
        """Whether a pass has hidden states of the stage before, and has not come to a layer of this stage."""

    def shape_of(self, name: str, where: str) -> torch.Tensor:
        """Make what a forward method makes masks and positions of: only its shape and dtype are of use."""
        value = self.values[name]
        # Masks and positions are made for the tokens of all ranks.
        num_ranks = self.sequence_parallel_size
        shape = value.shape if num_ranks == 1 else (value.shape[0], value.shape[1] * num_ranks, *value.shape[2:])
        return cast("torch.Tensor", _NoValues.apply(value, shape, where))

    def enter(self, carry: Any) -> None:
        """Begin a forward pass, or end one."""
        given = () if carry is None else carry if isinstance(carry, tuple) else (carry,)
        self.values = dict(zip(self.input_names, given, strict=bool(given)))
        self.is_before_layers = HIDDEN in self.values

    def watch_first_layer(self, layer: nn.Module, where: str) -> None:
        """Reject other inputs of the first layer of this stage than what the stage before has sent."""
        signature = inspect.signature(layer.forward)

        def check(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.is_before_layers:  # recomputed, or called again
                return
            self.is_before_layers = False
            if _first_argument(signature, args, kwargs) is not self.values[HIDDEN]:
                raise PlanError(
                    f"{_RULE} Found that {where}, the first of its stage, takes something else than what the previous "
                    "stage sent. Call the layers in their order, and put what happens between them into a layer; "
                    f"{_ELSE}"
                )

        layer.register_forward_pre_hook(check, prepend=True, with_kwargs=True)

    def explain(self, error: Exception) -> Exception:
        """Say why a forward method may fail before the layers of its stage."""
        if not self.is_before_layers or isinstance(error, (ColossalError, torch.OutOfMemoryError)):
            return error
        return PlanError(
            f"{_RULE} What runs before the layers gets tensors of the shape of the hidden states in place of what "
            f"pre_layers return. Found that it fails with these: {type(error).__name__}: {shorten(str(error), 160)} "
            "Make one module of all that runs before the layers, and name it in pre_layers of Stages."
        )

    def leave(self, values: Mapping[str, Any]) -> Exception:
        """End the forward pass of a stage."""
        known = self.values | dict(values)
        return StageEnd(tuple(known[name] for name in self.output_names))


class _NoValues(torch.autograd.Function):
    """NaN in any shape, of which no loss may depend."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, shape: Sequence[int], where: str) -> torch.Tensor:
        """Make a tensor that takes no memory."""
        ctx.where = where
        return like.new_full((), torch.nan if like.is_floating_point() else 0).expand(shape)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> Any:
        """Refuse."""
        raise PlanError(
            f"{_RULE} Found that the loss of a later stage also depends on what {ctx.where} returns, as over a skip "
            "connection. Return it from each layer beside the hidden states, and name both in layer_outputs of Stages; "
            f"{_ELSE}"
        )


def _first_argument(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs[next((name for name in signature.parameters if name in kwargs), HIDDEN)]


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Copy a module on the meta device."""
    tensors = chain(module.parameters(), module.buffers())
    # As the memo of `deepcopy`, so that no values are copied.
    empty = {id(each): torch.empty(each.shape, dtype=each.dtype, device="meta") for each in tensors}
    return copy.deepcopy(module, empty)


class _Placeholder(nn.Module):
    """Forward attribute accesses, such as the dtype of a weight, to the replaced module."""

    def __init__(self, native: nn.Module) -> None:
        super().__init__()
        self._native = (copy_to_meta(native),)  # in a tuple, so that it is no child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_native"][0], name)


@final
class PreviousStageLayer(nn.Module):
    """In the place of a layer of an earlier stage."""

    def __init__(self, passage: StageBoundary, gives: Sequence[str], where: str, *, is_last: bool) -> None:
        super().__init__()
        self._passage, self._gives, self._where, self._is_last = passage, tuple(gives), where, is_last

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the values from the previous stage."""
        if not self._passage.is_before_layers:
            raise PlanError(
                f"{_RULE} Found that {self._where}, of an earlier stage, is called after layers of this one, or in a "
                "backward pass. Call each layer in one place, with no checkpointed function around several layers, and "
                "checkpoint single ones with use_reentrant=False; "
                f"{_ELSE}"
            )
        values = self._passage.values
        hidden = values[HIDDEN] if self._is_last else self._passage.shape_of(HIDDEN, self._where)
        if not self._gives:
            return hidden
        return (hidden, *(values.get(name) for name in self._gives[1:]))


@final
class NextStageLayer(nn.Module):
    """In the place of a layer of a later stage."""

    def __init__(self, native: nn.Module, passage: StageBoundary) -> None:
        super().__init__()
        self._signature, self._passage = inspect.signature(native.forward), passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward pass."""
        given = self._signature.bind(*args, **kwargs).arguments
        raise self._passage.leave(
            {name: given[name] for name in self._passage.output_names if name in given}
            | {HIDDEN: _first_argument(self._signature, args, kwargs)}
        )


@final
class InputPlaceholder(_Placeholder):
    """In the place of what makes hidden states of inputs: they are here already."""

    def __init__(self, native: nn.Module, passage: StageBoundary, source: str, where: str, makes_states: bool) -> None:
        super().__init__(native)
        self._passage, self._source, self._where, self._makes_states = passage, source, where, makes_states

    def forward(self, *args: Any, **_kwargs: Any) -> torch.Tensor:
        """Return what is like hidden states, or zeros in the place of what is added to them."""
        states, given = self._passage.shape_of(self._source, self._where), args[0] if args else None
        if self._makes_states or (isinstance(given, torch.Tensor) and given.shape == states.shape):
            return states
        zero = states.new_zeros(())
        if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dim() == states.dim():
            # Models look at the shape of an embedding; an expanded zero has it without the memory.
            return zero.expand(*given.shape[:-1], states.shape[-1])
        return zero


@final
class ComputedEncoder(_Placeholder):
    """In the place of a module all of whose layers earlier stages have, such as an encoder."""

    def __init__(self, native: nn.Module, passage: StageBoundary) -> None:
        super().__init__(native)
        self._passage, self._is_output = passage, hasattr(native, "config")

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the result that came from the stage before."""
        result = self._passage.values[RESULT]
        if not self._is_output:
            return result
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(last_hidden_state=result)


@final
class MetaModule(_Placeholder):
    """In the place of what other stages have: what it returns has shapes only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run without data."""
        return self._native[0](*args, **kwargs)
