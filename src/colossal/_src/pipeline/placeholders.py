"""What stands in a stage for the parts of its model that other stages have.

The forward method of a model still runs from its beginning on every stage, and makes masks and positions of the inputs.
Layers of earlier stages hand over what came from the stage before; the first layer of a later stage ends the pass.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import nn

HIDDEN = "hidden_states"
"""The name of what one layer hands to the next."""

RESULT = "result"
"""The name of what a list of layers that has come to its end hands to the next list."""


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

    def states(self, name: str) -> torch.Tensor:
        """Make what a forward method makes masks and positions of."""
        # Only its shape and dtype are of use: no gradient may flow through what is made of it.
        value = self.values[name].detach()
        if self.sequence_parallel_size == 1:
            return value
        # Masks and positions are made for the tokens of all ranks; expanding takes no memory.
        return value[:, :1].expand(-1, value.shape[1] * self.sequence_parallel_size, *value.shape[2:])

    def enter(self, carry: Any) -> None:
        """Begin a forward pass, or end one."""
        given = () if carry is None else carry if isinstance(carry, tuple) else (carry,)
        self.values = dict(zip(self.input_names, given, strict=bool(given)))

    def leave(self, values: Mapping[str, Any]) -> Exception:
        """End the forward pass of a stage."""
        known = self.values | dict(values)
        return StageEnd(tuple(known[name] for name in self.output_names))


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

    def __init__(self, passage: StageBoundary, gives: Sequence[str]) -> None:
        super().__init__()
        self._passage, self._gives = passage, tuple(gives)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the values from the previous stage."""
        values = self._passage.values
        if not self._gives:
            return values[HIDDEN]
        return (values[HIDDEN], *(values.get(name) for name in self._gives[1:]))


@final
class NextStageLayer(nn.Module):
    """In the place of a layer of a later stage."""

    def __init__(self, native: nn.Module, passage: StageBoundary) -> None:
        super().__init__()
        self._signature, self._passage = inspect.signature(native.forward), passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward pass."""
        given = self._signature.bind(*args, **kwargs).arguments
        hidden = args[0] if args else kwargs[HIDDEN]
        raise self._passage.leave(
            {name: given[name] for name in self._passage.output_names if name in given} | {HIDDEN: hidden}
        )


@final
class InputPlaceholder(_Placeholder):
    """In the place of what makes hidden states of inputs: they are here already."""

    def __init__(self, native: nn.Module, passage: StageBoundary, source: str, makes_states: bool) -> None:
        super().__init__(native)
        self._passage, self._source, self._makes_states = passage, source, makes_states

    def forward(self, *args: Any, **_kwargs: Any) -> torch.Tensor:
        """Return hidden states, or zeros in the place of what is added to them."""
        states, given = self._passage.states(self._source), args[0] if args else None
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
