"""Parameters that came into a model after it was boosted."""

from functools import cache
from weakref import ref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from colossal._src.interface import ModelWrapper, OptimizerWrapper, unwrap_model
from colossal.errors import ConfigError

_IS_BOOSTED = "_is_boosted"


class _Registrations:
    """Counts what modules of boosted models have been given, so that steps need not look at all parameters of a model.

    Not what others have: models of transformers build a list of modules in each forward pass. In compiled ones this is
    traced, which knows what is in the dictionary of a module, and no weak set of modules.
    """

    number = 0


@cache
def _watch() -> None:
    def note(module: nn.Module, *_registered: object) -> None:
        if _IS_BOOSTED in module.__dict__:
            _Registrations.number += 1

    register_module_module_registration_hook(note)
    register_module_parameter_registration_hook(note)


def refuse_new_parameters(model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
    """Reject steps after backward passes of parameters that nothing reduces over ranks, and no optimizer has."""
    known = frozenset(unwrap_model(model).parameters())
    # not the objects, which would keep each other alive
    owner, updater = ref(model), ref(optimizer)
    _watch()
    seen = -1

    def check() -> None:
        nonlocal seen
        if seen == _Registrations.number:
            return
        wrapper, wrapped = owner(), updater()
        if wrapper is None or wrapped is None:
            return
        others = {name: each for name, each in unwrap_model(wrapper).named_parameters() if each not in known}
        if others:
            _refuse(others, wrapped)
        else:
            seen = _Registrations.number
            for module in wrapper.modules():
                module.__dict__[_IS_BOOSTED] = True

    optimizer.register_step_check(check)


def _refuse(others: dict[str, nn.Parameter], optimizer: OptimizerWrapper) -> None:
    held = {*optimizer.parameters, *(() if optimizer.masters is None else optimizer.masters.pairs.values())}
    names = [name for name, each in others.items() if each not in held and each.grad is not None]
    if names:
        raise ConfigError(
            "An optimizer has the parameters that the model had when it was boosted. Found gradients of "
            f"{len(names)} others, such as {names[0]}, as of a module in the place of another, which nothing reduces "
            "over ranks. Exchange modules before boost, or give the module that is there the new values by its "
            "load_state_dict."
        )
