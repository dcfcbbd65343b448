"""What hangs on a parameter or a module that a sharded one takes the place of: hooks, and attributes of the program."""

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from colossal._src.tensor.placement import PLACEMENT_ATTRIBUTE
from colossal.errors import UnsupportedError

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def hook_ids_of(root: nn.Module) -> set[int]:
    """Find the hooks on a module and those in it, by the numbers that copies of the module keep."""
    return {number for module in root.modules() for kind in _HOOKS for number in getattr(module, kind)}


def keep_hooks(root: nn.Module, kept: Container[int]) -> None:
    """Remove all other hooks from a module and those in it."""
    for module in root.modules():
        for kind in _HOOKS:
            hooks = getattr(module, kind)
            for number in [each for each in hooks if each not in kept]:
                del hooks[number]


def remove_hook(module: nn.Module, number: int) -> None:
    """Remove a hook by its number: of a copy too, which the handle does not know."""
    for kind in _HOOKS:
        getattr(module, kind).pop(number, None)


def refuse_gradient_hooks(named: Iterable[tuple[str, nn.Parameter]], method: str) -> None:
    """Refuse hooks on parameters that are replaced by shards: they would never run, or see a part of the gradient."""
    for name, parameter in named:
        hooked: Any = parameter
        if hooked._backward_hooks or hooked._post_accumulate_grad_hooks:  # noqa: SLF001 (torch has no public names)
            raise UnsupportedError(
                f"{method} replaces parameters by shards, on which hooks of a full gradient do not run. Found a hook "
                f"on {name}. Remove it, or train with TorchDDPPlugin, LowLevelZeroPlugin or GeminiPlugin without "
                "tensor parallelism, under which hooks run."
            )


def carry_over_attributes(replaced: nn.Parameter | nn.Module, new: nn.Parameter | nn.Module) -> None:
    """Give a new parameter or module the attributes that the program has put on the one that it replaces."""
    built = {PLACEMENT_ATTRIBUTE, "nf", "nx", *getattr(replaced, "__constants__", ())}  # nf, nx: of Conv1D
    private = isinstance(replaced, nn.Module)
    if not private and type(replaced) is not nn.Parameter:  # what a lazy one has is its own
        return
    for name, value in vars(replaced).items():
        if name not in vars(new) and name not in built and not (private and name.startswith("_")):
            setattr(new, name, value)


def carry_over_hooks(replaced: nn.Module, new: nn.Module) -> None:
    """Give a new module the hooks of the one that it replaces, after its own; handles remove them as before."""
    for name in _HOOKS:
        hooks, own = getattr(replaced, name), dict(getattr(new, name))
        carried = dict(hooks)
        hooks.clear()
        hooks.update(own)
        hooks.update(carried)
        setattr(new, name, hooks)  # the very object that handles refer to
    if vars(replaced)["_backward_hooks"]:
        vars(new)["_is_full_backward_hook"] = vars(replaced)["_is_full_backward_hook"]
