"""Several optimizers of one model as one."""

from collections import Counter
from typing import Any, final

import torch
from torch.optim import Optimizer

from colossal.errors import ConfigError


@final
class CombinedOptimizer(Optimizer):
    """Several optimizers, each of some of a model's parameters, as the one that `Booster.boost` takes.

    A step is one of each. Parameter groups are those of the first, then of the second, and so on, in the same dicts, so
    that schedules of this one are schedules of them. They run where each of them runs by itself.

    Args:
        *optimizers: Plain optimizers, such as `torch.optim.Muon` of the matrices and `torch.optim.AdamW` of the rest.

    Raises:
        ConfigError: There is none, or one that is no optimizer of PyTorch, or two have the same parameter.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import CombinedOptimizer
        >>> linear = torch.nn.Linear(2, 2)
        >>> optimizer = CombinedOptimizer(
        ...     torch.optim.Muon([linear.weight], lr=0.02), torch.optim.AdamW([linear.bias], lr=1e-3)
        ... )
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.001]
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
            raise ConfigError(
                "A CombinedOptimizer is built of optimizers of PyTorch. Found "
                f"{', '.join(type(each).__name__ for each in optimizers) or 'none'}. Pass for example "
                "CombinedOptimizer(torch.optim.Muon(matrices), torch.optim.AdamW(others))."
            )
        groups = [group for each in optimizers for group in each.param_groups]
        repeated = sum(count > 1 for count in Counter(each for group in groups for each in group["params"]).values())
        if repeated:
            raise ConfigError(
                f"Each parameter has one optimizer. Found {repeated} in several. Give each optimizer parameters of its "
                "own."
            )
        self.optimizers = optimizers
        self._is_built = False
        super().__init__(groups, {})
        self._is_built = True
        for each in optimizers:
            self.state.update(each.state)
        self._connect()

    def _connect(self) -> None:
        """Let each optimizer update what this one has, which may be shards by now, or loaded."""
        start = 0
        for each in self.optimizers:
            end = start + len(each.param_groups)
            each.param_groups, each.state, start = self.param_groups[start:end], self.state, end

    def __getstate__(self) -> dict[str, Any]:
        """Take the optimizers into copies."""
        return {**super().__getstate__(), "optimizers": self.optimizers, "_is_built": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue from groups and states, as a copy or a checkpoint has them."""
        super().__setstate__(state)
        self._connect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group of which no optimizer is known.

        Args:
            param_group: The group.

        Raises:
            ConfigError: Always, but inside of the constructor.
        """
        if self._is_built:
            raise ConfigError(
                "A parameter group belongs to one of the combined optimizers. Found one for all of them. Add it to one "
                "before they are combined."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make a step of each optimizer.

        Args:
            closure: Computes the loss and new gradients, once.

        Returns:
            What the closure returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss
