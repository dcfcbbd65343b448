"""Which modules of a model are gathered and freed together."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from colossal.errors import ConfigError, UnsupportedError


def find_units(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> list[nn.Module]:
    """Choose the modules whose parameters are gathered together; the root module takes all other parameters.

    Parameters that are tied between modules must be gathered together: units that hold only some of the modules are
    dissolved into what surrounds them.
    """
    chosen = set(_blocks_of(model) if policy is None else _apply_policy(policy, model, ignored))
    inside_ignored = {inner for module in ignored for inner in module.modules()}
    chosen = {
        module
        for module in chosen - inside_ignored - {model}
        if _has_forward(module) and next(module.parameters(), None) is not None
    }
    # such a unit would free the parameter while a module outside of it needs it
    chosen -= _units_splitting_tied_params(model, chosen)
    # inner modules first: an outer unit takes what is left
    return [module for module in reversed(list(model.modules())) if module in chosen]


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Take what a transformers model says must stay together, or else the entries of the outermost lists."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    named = [module for module in model.modules() if type(module).__name__ in names]
    return named or list(_entries(model))


def _entries(module: nn.Module, inside: bool = False) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _entries(child, inside=True)
        elif inside and _has_forward(child):
            yield child
        else:
            yield from _entries(child, inside)


def _apply_policy(policy: Any, model: nn.Module, ignored: set[nn.Module]) -> set[nn.Module]:
    if hasattr(policy, "_run_policy"):
        answers = policy._run_policy(model, ignored_modules=ignored, root_kwargs={})  # noqa: SLF001 (its only way)
        if options := next((each for each in answers.values() if each), None):
            raise UnsupportedError(
                "TorchFSDPPlugin shards all units by the same options. Found a policy that gives "
                f"{options} to some. Let it return True or False."
            )
        return set(answers)
    if not callable(policy):
        raise ConfigError(
            f"auto_wrap_policy is one of the policies of torch.distributed.fsdp.wrap. Found {policy!r}. "
            "Pass for example ModuleWrapPolicy({Block}), or leave it out."
        )
    units: set[nn.Module] = set()
    ignored_params = {parameter for module in ignored for parameter in module.parameters()}
    _wrap_recursively(policy, model, ignored_params, units)
    return units


def _wrap_recursively(
    policy: Callable[..., object], module: nn.Module, ignored_params: set[nn.Parameter], found: set[nn.Module]
) -> int:
    """Apply a policy to a module and its children; return the number of elements that it put into units."""
    held = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored_params)
    if not policy(module=module, recurse=True, nonwrapped_numel=held):
        return 0
    taken = sum(_wrap_recursively(policy, child, ignored_params, found) for child in module.children())
    if not policy(module=module, recurse=False, nonwrapped_numel=held - taken):
        return taken
    found.add(module)
    return held


def _units_splitting_tied_params(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """Find the units that hold a parameter which is also used outside of them."""
    by_path = dict(model.named_modules(remove_duplicate=False))
    around: dict[nn.Parameter, list[set[nn.Module]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        steps = name.split(".")[:-1]
        holders = {by_path[".".join(steps[:end])] for end in range(1, len(steps) + 1)}
        around.setdefault(parameter, []).append(holders & chosen)
    return {unit for uses in around.values() for unit in set.union(*uses) - set.intersection(*uses)}


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
