"""Float32 copies of half-precision parameters, which hold what an update adds until half precision can show it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp.data_aliases import DataAliases
from colossal._src.tensor import copy_placement
from colossal.logging import get_dist_logger


class MasterParams(ABC):
    """What an optimizer holds in place of the parameters of the model: float32 copies, or this rank's shards.

    In each step `copy_grads_to_masters` gives them the gradients of the working parameters, the optimizer updates them,
    and `copy_params_from_masters` copies the new values back.

    Attributes:
        pairs: The working parameter of each master weight.
        aliases: The working parameters that a program may write by ``parameter.data``.

    Example:
        >>> import torch
        >>> from colossal import Booster
        >>> from colossal.amp import MasterParams
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> model, optimizer, *_ = Booster(device="cpu", mixed_precision="fp16_naive").boost(model, optimizer)
        >>> isinstance(optimizer.masters, MasterParams), len(optimizer.masters.pairs)
        (True, 2)
    """

    pairs: dict[nn.Parameter, nn.Parameter]
    aliases: DataAliases

    def backward_pass(self) -> AbstractContextManager[Any]:
        """Open the context in which gradients of the working parameters are computed.

        Returns:
            A new context manager; by default one that does nothing.
        """
        return nullcontext()

    @abstractmethod
    def add_group(self, group: dict[str, Any]) -> Mapping[nn.Parameter, nn.Parameter]:
        """Create master weights for a group that was added to the optimizer.

        Args:
            group: One of the optimizer's groups; changed in place.

        Returns:
            The new master weights, and the working parameter of each.
        """

    @abstractmethod
    def copy_grads_to_masters(self) -> None:
        """Move the gradients of the working parameters to the master weights, adding to what is there."""

    @abstractmethod
    def copy_params_from_masters(self) -> None:
        """Copy the values of the master weights into the working parameters."""

    @abstractmethod
    def refresh(self) -> None:
        """Copy the values of the working parameters into the master weights."""

    @abstractmethod
    def holds_grad(self, working: nn.Parameter) -> bool:
        """Say whether the gradient of a working parameter has moved here.

        Args:
            working: A parameter of the model.

        Returns:
            True: the optimizer holds it, and the parameter has none.
        """

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the working parameters.

        Args:
            set_to_none: Free them rather than fill them with zeros.
        """


@final
class MasterWeights(MasterParams):
    """Keeps float32 master weights in an optimizer, and the half-precision working parameters in the model.

    In each step, the gradients of the working parameters move to the master weights, the optimizer updates these,
    and their rounded values are copied to the working parameters. A value that is written into a working parameter,
    such as by `torch.nn.Module.load_state_dict`, is copied to its master weight before the next step.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740, section 3.1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        dtype: torch.dtype = torch.float16,
        log_zeros: bool = False,
    ) -> None:
        self.pairs: dict[nn.Parameter, nn.Parameter] = {}
        self.aliases = DataAliases()
        self._optimizer = optimizer
        self._dtype = dtype
        self._log_zeros = log_zeros
        self._versions: dict[nn.Parameter, int] = {}
        wanted = set(parameters)
        for group in optimizer.param_groups:
            self._add_group([parameter for parameter in group["params"] if parameter in wanted], group)

    def add_group(self, group: dict[str, object]) -> dict[nn.Parameter, nn.Parameter]:
        """Create master weights for the half-precision parameters of a group that was added to the optimizer."""
        parameters: list[nn.Parameter] = list(group["params"])  # type: ignore[call-overload]
        return self._add_group([parameter for parameter in parameters if parameter.dtype == self._dtype], group)

    def _add_group(self, parameters: list[nn.Parameter], group: dict[str, object]) -> dict[nn.Parameter, nn.Parameter]:
        masters = {working: self._make_master(working) for working in parameters}
        held: list[nn.Parameter] = group["params"]  # type: ignore[assignment]
        held[:] = [masters.get(parameter, parameter) for parameter in held]  # in place: LBFGS keeps this very list
        for working, master in masters.items():
            if working in self._optimizer.state:
                self._optimizer.state[master] = self._optimizer.state.pop(working)
        added = {master: working for working, master in masters.items()}
        self.pairs |= added
        return added

    def _make_master(self, working: nn.Parameter) -> nn.Parameter:
        """Make the master of a parameter, which takes over its memory if that is float32 already."""
        values = working.detach()
        # a copy where both have one dtype: else the master weight and the parameter would be the same memory
        float32 = values.to(torch.float32, copy=values.dtype == self._dtype)
        working.data = values.to(self._dtype)
        master = nn.Parameter(float32, requires_grad=working.requires_grad)
        copy_placement(master, working)
        if working.grad is not None:
            master.grad, working.grad = working.grad.to(torch.float32), None
        self._versions[master] = _version_of(working)
        return master

    def copy_grads_to_masters(self) -> None:
        """Move the gradients of the working parameters to the master weights, adding to what is there."""
        self._refresh(self._modified_masters())
        pulled = {master: working.grad for master, working in self.pairs.items() if working.grad is not None}
        if self._log_zeros and pulled:
            self._report_zeros(list(pulled.values()))
        for master, grad in pulled.items():
            master.grad = grad.to(torch.float32) if master.grad is None else master.grad.add_(grad)
            self.pairs[master].grad = None

    @torch.no_grad()
    def copy_params_from_masters(self) -> None:
        """Round the master weights into the working parameters."""
        masters: list[torch.Tensor] = list(self.pairs)
        working: list[torch.Tensor] = list(self.pairs.values())
        if masters:
            torch._foreach_copy_(working, masters)
        self._versions = {master: _version_of(parameter) for master, parameter in self.pairs.items()}

    def refresh(self) -> None:
        """Copy the values of the working parameters into the master weights; elsewhere ``update_master_params``.

        An element of a master whose rounded value is the working one already is kept: it is more exact. Only values
        that were written past the counter of changes that torch keeps, such as by NumPy, need this call.
        """
        self._refresh(list(self.pairs))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the working parameters; the optimizer does so with those of the master weights."""
        for working in self.pairs.values():
            if set_to_none:
                working.grad = None
            elif working.grad is not None:
                working.grad.detach_().zero_()

    def holds_grad(self, working: nn.Parameter) -> bool:
        """Return whether the gradient of a working parameter has moved to its master weight."""
        return any(each is working and master.grad is not None for master, each in self.pairs.items())

    def _modified_masters(self) -> list[nn.Parameter]:
        written = self.aliases.take()
        return [
            master
            for master, working in self.pairs.items()
            if _version_of(working) != self._versions[master] or working in written
        ]

    @torch.no_grad()
    def _refresh(self, masters: list[nn.Parameter]) -> None:
        for master in masters:
            working = self.pairs[master]
            # a master weight that rounds to the parameter keeps the bits for which half precision has no room
            same = master.to(working.dtype) == working
            master.copy_(torch.where(same, master, working.to(master.dtype)))
            self._versions[master] = _version_of(working)

    def _report_zeros(self, grads: list[torch.Tensor]) -> None:
        total = sum(grad.numel() for grad in grads)
        zeros = sum(int((grad == 0).sum()) for grad in grads)
        message = f"{zeros} of {total} gradient elements are 0 ({zeros / total:.1%})"
        get_dist_logger().info(message, ranks=[0])


def _version_of(parameter: nn.Parameter) -> int:
    """How often torch has seen the values of a parameter written."""
    return parameter._version  # noqa: SLF001 (it has no public name)
