"""Steps of a wrapped optimizer past its wrapper, which would use no gradients and reach no parameters of the model."""

from typing import Any, Self, final

import torch

from colossal.errors import ConfigError

_KEY = "_colossal_direct_steps"


@final
class DirectSteps:
    """Refuses them where the optimizer holds other tensors than the model has; a context in which a step is allowed."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._is_allowed = False
        self._handle = optim.register_step_pre_hook(self._check)

    @classmethod
    def watch(cls, optim: torch.optim.Optimizer, *, has_masters: bool) -> Self | None:
        """Begin to refuse, in place of what an earlier wrapper of the optimizer did."""
        earlier = vars(optim).pop(_KEY, None)
        if earlier is not None:
            earlier.stop()
        if not has_masters:
            return None
        vars(optim)[_KEY] = watched = cls(optim)
        return watched

    def stop(self) -> None:
        """Refuse nothing more."""
        self._handle.remove()

    def __enter__(self) -> None:
        self._is_allowed = True

    def __exit__(self, *_: object) -> None:
        self._is_allowed = False

    def _check(self, optim: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_allowed:
            raise ConfigError(
                "A boosted optimizer is stepped by what boost returned, which moves values between it and the "
                f"model. Found a step of {type(optim).__name__} itself, which holds master weights or shards: "
                "nothing would be trained. Call step() of the second value that boost returns."
            )
