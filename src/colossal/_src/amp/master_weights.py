"""Float32 copies of half-precision parameters, which hold what an update adds until half precision can show it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp.data_aliases import DataAliases
from colossal._src.tensor import copy_placement, grad_of, set_grad, set_values, values_of, version_of
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger


class MasterParams(ABC):
    """What an optimizer holds in place of the parameters of the model: float32 copies, or this rank's shards.

    In each step `copy_grads_to_masters` gives them the gradients of the working parameters, the optimizer updates them,
    and `copy_params_from_masters` copies the new values back.

    Attributes:
        pairs: The working parameter of each master weight.

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

    def copy_written(self) -> None:  # noqa: B027 (need not be there)
        """Copy values into the model that a program wrote into what the optimizer holds; by default, nothing.

        Raises:
            ConfigError: It wrote the parameters of the model too, since the last step.

        Communication: none of copies on each rank; all_gather, dp, of written shards the parameters' bytes.
        """

    def expect_writes(self, working: nn.Parameter, values: torch.Tensor) -> None:  # noqa: B027 (need not be there)
        """Take note that a program may write a parameter past torch's counter of changes; by default, nothing.

        Args:
            working: A parameter of the model.
            values: The tensor that ``parameter.data`` gave to the program, of the parameter's shape.
        """

    @abstractmethod
    def holds_grad(self, working: nn.Parameter) -> bool:
        """Say whether the gradient of a working parameter has moved here.

        Args:
            working: A parameter of the model.

        Returns:
            True: the optimizer holds it, and the parameter has none.
        """

    def has_grad_for(self, master: nn.Parameter) -> bool:
        """Say whether a master weight has yet to get a gradient, that of its working parameter.

        Args:
            master: What the optimizer holds, which has no gradient.

        Returns:
            True: the next `copy_grads_to_masters` gives it one.
        """
        working = self.pairs.get(master)
        return working is not None and grad_of(working) is not None

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the working parameters.

        Args:
            set_to_none: Free them rather than fill them with zeros.
        """


def refuse_two_writes() -> NoReturn:
    """Refuse values of which nothing says which are to count."""
    raise ConfigError(
        "A parameter of the model and its master weight, or shard, have the same values. Found that since the last "
        "step both were written, as by load_state_dict of the model and then by a loop over optimizer.param_groups. "
        "Write those of the model only, under torch.no_grad(), or run a forward pass in between."
    )


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
        self._aliases = DataAliases()
        self._optimizer = optimizer
        self._dtype = dtype
        self._log_zeros = log_zeros
        self._masters: dict[nn.Parameter, nn.Parameter] = {}  # by working parameter
        self._versions: list[int] = []  # of the working parameters, in the order of the pairs
        self._master_versions: list[int] = []
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
        self._masters |= masters
        self._versions += map(version_of, masters)
        self._master_versions += map(version_of, added)
        return added

    def _make_master(self, working: nn.Parameter) -> nn.Parameter:
        """Make the master of a parameter, which takes over its memory if that is float32 already."""
        values = values_of(working)  # whose version counts no writes of the parameter
        # a copy where both have one dtype: else the master weight and the parameter would be the same memory
        float32 = values.to(torch.float32, copy=values.dtype == self._dtype)
        set_values(working, values.to(self._dtype))
        master = nn.Parameter(float32, requires_grad=working.requires_grad)
        copy_placement(master, working)
        if (grad := grad_of(working)) is not None:
            set_grad(master, grad.to(torch.float32))
            set_grad(working, None)
        return master

    def copy_grads_to_masters(self) -> None:
        """Move the gradients of the working parameters to the master weights, adding to what is there."""
        self._refresh(self._modified())
        if self._log_zeros:
            self._report_zeros([grad for grad in map(grad_of, self.pairs.values()) if grad is not None])
        for master, working in self.pairs.items():
            if (grad := grad_of(working)) is not None:
                held = grad_of(master)
                set_grad(master, grad.to(torch.float32) if held is None else held.add_(grad))
                set_grad(working, None)

    @torch.no_grad()
    def copy_params_from_masters(self) -> None:
        """Round the master weights into the working parameters."""
        masters: list[torch.Tensor] = list(self.pairs)
        working: list[torch.Tensor] = list(self.pairs.values())
        if masters:
            torch._foreach_copy_(working, masters)
        self._versions, self._master_versions = list(map(version_of, working)), list(map(version_of, masters))

    def copy_written(self) -> None:
        """Round master weights into the working parameters if a program wrote them since these were noted."""
        versions = list(map(version_of, self.pairs))
        if versions == self._master_versions:
            return
        pairs = zip(self.pairs.values(), versions, self._master_versions, self._versions, strict=True)
        if any(new != old and version_of(working) != noted for working, new, old, noted in pairs):
            refuse_two_writes()
        self.copy_params_from_masters()

    def refresh(self) -> None:
        """Copy the values of the working parameters into the master weights; elsewhere ``update_master_params``.

        An element of a master whose rounded value is the working one already is kept: it is more exact. Only values
        that were written past the counter of changes that torch keeps, such as by NumPy, need this call.
        """
        self._refresh(range(len(self.pairs)))
        self._master_versions = list(map(version_of, self.pairs))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the working parameters; the optimizer does so with those of the master weights."""
        for working in self.pairs.values():
            if set_to_none:
                set_grad(working, None)
            elif (grad := grad_of(working)) is not None:
                grad.detach_().zero_()

    def expect_writes(self, working: nn.Parameter, values: torch.Tensor) -> None:
        """Take note of a tensor by which a program may write a parameter."""
        self._aliases.add(working, values)

    def holds_grad(self, working: nn.Parameter) -> bool:
        """Return whether the gradient of a working parameter has moved to its master weight."""
        master = self._masters.get(working)
        return master is not None and grad_of(master) is not None

    def _modified(self) -> Sequence[int]:
        """Return which working parameters have changed since their versions were noted, by number."""
        written = self._aliases.take()
        versions = list(map(version_of, self.pairs.values()))
        if versions == self._versions and not written:
            return ()
        changed = zip(versions, self._versions, self.pairs.values(), strict=True)
        return [at for at, (now, noted, working) in enumerate(changed) if now != noted or working in written]

    @torch.no_grad()
    def _refresh(self, numbers: Sequence[int]) -> None:
        pairs = list(self.pairs.items()) if numbers else []
        for number in numbers:
            master, working = pairs[number]
            # a master weight that rounds to the parameter keeps the bits for which half precision has no room
            same = master.to(working.dtype) == working
            master.copy_(torch.where(same, master, working.to(master.dtype)))
            self._versions[number], self._master_versions[number] = version_of(working), version_of(master)

    def _report_zeros(self, grads: list[torch.Tensor]) -> None:
        if not grads:
            return
        total = sum(grad.numel() for grad in grads)
        zeros = sum(int((grad == 0).sum()) for grad in grads)
        message = f"{zeros} of {total} gradient elements are 0 ({zeros / total:.1%})"
        get_dist_logger().info(message, ranks=[0])
