"""One parameter in one step: its values, gradient and state on this rank, in the precision to compute in."""

from collections.abc import MutableMapping, Sequence
from typing import Any, final

import torch

from colossal.nn.optimizer.base import dtype_of_state
from colossal.nn.optimizer.cut import Cut
from colossal.tensor import local_of, mark_like


@final
class Part:
    """What a rank has of a parameter that is being updated.

    Args:
        param: The parameter, which has a gradient.
        group: Its group, with the hyperparameters.
        state: Its state, which is filled.
        cut: Where its elements lie in the whole parameter.
        index: Its number among those that are updated.

    Attributes:
        group: The hyperparameters.
        cut: Where the elements lie.
        index: The number of the parameter, the same on all ranks.
        grad: The gradient of these elements, in the precision of the state.
        step: The number of this step, from 1.
    """

    def __init__(
        self, param: torch.Tensor, group: dict[str, Any], state: MutableMapping[str, Any], cut: Cut, index: int = 0
    ) -> None:
        assert param.grad is not None
        self.group, self.cut, self.index = group, cut, index
        self._param, self._state, self._dtype = param, state, dtype_of_state(param)
        self._own = cut.own(param)
        self.grad = cut.own(param.grad).to(self._dtype)
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        self.step = int(state["step"])

    @property
    def values(self) -> torch.Tensor:
        """The values, in the precision of the state; in memory of their own if that is another one."""
        return self._own.to(self._dtype)

    def like_values(self, name: str) -> torch.Tensor:
        """Find a state that has a number for each element here; zeros at first.

        Args:
            name: The name of the state.

        Returns:
            The state, to be changed in place.
        """
        if name not in self._state:
            is_padded = self._own.numel() != local_of(self._param).numel()
            like = self._own if is_padded else self._param.detach()
            self._state[name] = mark_like(torch.zeros_like(like, dtype=self._dtype), self._param)
        elif self._widen(name):
            self._state[name] = mark_like(self._state[name], self._param)
        return self.cut.own(self._state[name])

    def whole(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Find a state that all ranks have in whole; zeros at first.

        Args:
            name: The name of the state.
            shape: Its shape.

        Returns:
            The state, to be changed in place.
        """
        if name not in self._state:
            self._state[name] = torch.zeros(tuple(shape), dtype=self._dtype, device=self._own.device)
        self._widen(name)
        return self._state[name]

    def subtract(self, update: torch.Tensor) -> None:
        """Take an update away from the values.

        Args:
            update: As `values`.
        """
        self._own.sub_(update)

    def _widen(self, name: str) -> bool:
        """Undo that somebody cast a state as torch does; tell whether there was something to undo."""
        narrow = self._state[name]
        self._state[name] = narrow.to(self._dtype)
        return self._state[name] is not narrow
