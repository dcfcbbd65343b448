# pyright: reportIncompatibleVariableOverride=false
"""What torch takes for an optimizer, such as its schedules do, and that holds nothing itself."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from colossal.errors import ConfigError, UnsupportedError


class TorchOptimizer(torch.optim.Optimizer):
    """An optimizer of torch by its type; groups, states and hooks are those of another one.

    Attributes:
        optim: The optimizer that holds the state and does the update.
    """

    optim: torch.optim.Optimizer

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        # not the constructor of torch, which would make groups and states of this object
        self.optim = optim
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def __repr__(self) -> str:
        """The wrapped optimizer, with its parameter groups."""
        return f"{type(self).__name__}({self.optim!r})"

    if not TYPE_CHECKING:  # a checker knows of no attribute that is missing then

        def __getattr__(self, name: str) -> Any:
            """Say where an attribute is that only the wrapped optimizer has."""
            has_it = hasattr(vars(self).get("optim"), name)
            advice = f". The optimizer that was boosted has it: use optimizer.unwrap().{name}" if has_it else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default hyperparameters of the wrapped optimizer."""
        return self.optim.defaults

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The per-parameter state of the wrapped optimizer."""
        return self.optim.state

    @state.setter
    def state(self, state: Mapping[torch.Tensor, Any]) -> None:
        self.optim.state = state  # type: ignore[assignment]

    # hooks of torch: before a step they see unscaled gradients, and after it the new values in the model

    @property
    def _optimizer_step_pre_hooks(self) -> OrderedDict[int, Callable[..., Any]]:
        return vars(self.optim)["_optimizer_step_pre_hooks"]

    @property
    def _optimizer_state_dict_pre_hooks(self) -> OrderedDict[int, Callable[..., Any]]:
        return vars(self.optim)["_optimizer_state_dict_pre_hooks"]

    @property
    def _optimizer_state_dict_post_hooks(self) -> OrderedDict[int, Callable[..., Any]]:
        return vars(self.optim)["_optimizer_state_dict_post_hooks"]

    @property
    def _optimizer_load_state_dict_pre_hooks(self) -> OrderedDict[int, Callable[..., Any]]:
        return vars(self.optim)["_optimizer_load_state_dict_pre_hooks"]

    @property
    def _optimizer_load_state_dict_post_hooks(self) -> OrderedDict[int, Callable[..., Any]]:
        return vars(self.optim)["_optimizer_load_state_dict_post_hooks"]

    def _run_post_hooks(self, args: tuple[Any, ...]) -> None:
        for hook in tuple(self._optimizer_step_post_hooks.values()):
            hook(self, args, {})

    @property
    def has_full_grads(self) -> bool:
        """Whether torch's functions can take the gradients."""
        return True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler of torch asks for before it steps."""
        if not self.has_full_grads:
            raise ConfigError(
                "Gradients that are sharded over ranks, or that are in master weights, are unscaled by the boosted "
                "optimizer, which skips the steps of overflows on all ranks. Found a torch.amp.GradScaler, which sees "
                "those of one rank, or none. Leave it out, and train with mixed_precision='fp16' of the Booster, or "
                "precision='fp16' of the plugin."
            )
        return False

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled, which would leave the model behind."""
        raise UnsupportedError(
            "A boosted optimizer belongs to the boosted model, whose gradients it has. Found a copy of it, by "
            "copy.deepcopy or pickle. Save it by booster.save_optimizer(optimizer, checkpoint), keep the states of a "
            "moment by copy.deepcopy(optimizer.state_dict()), or copy model and optimizer before boost."
        )
