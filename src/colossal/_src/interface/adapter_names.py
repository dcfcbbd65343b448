"""Adapters of peft in a model: what its tensors are called in the files of a checkpoint."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast, final

from torch import nn

_PREFIX = "base_model.model."
"""The prefix of every name in an adapter file of peft."""


@final
@dataclass(frozen=True)
class AdapterNames:
    """The names that the state of a model with adapters has in the model, and in the files of a checkpoint."""

    # by name in the state of the adapted model, the name of the same tensor in the base model without adapters
    base: Mapping[str, str]
    # by name in a file of adapters, as peft has it, the name in the state of the adapted model
    adapters: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, adapter: str | None = None) -> Self | None:
        """Look for adapters in a model, without importing peft: where it is not loaded, there are none.

        Those of the named one, by default of the one that is trained, have the names of peft's files.
        """
        if not has_adapter_layers(model):
            return None
        from peft import get_peft_model_state_dict

        adapted: Any = model
        state = {name: name for name in model.state_dict(keep_vars=True)}  # of which peft looks at the keys only
        with _without_values(model):
            found = get_peft_model_state_dict(
                adapted, state_dict=state, adapter_name=adapter or active_adapter(adapted), save_embedding_layers=False
            )
        base = model_without_adapters(model)
        start = next(name for name, module in model.named_modules() if module is base)
        prefix, missing = (f"{start}." if start else ""), ("" if start else _PREFIX)
        paths = {name: _base_path(base, name.removeprefix(prefix)) for name in state if name.startswith(prefix)}
        return cls(
            {name: path for name, path in paths.items() if path is not None},
            {missing + str(saved): str(name) for saved, name in found.items()},
        )


def has_adapter_layers(model: nn.Module) -> bool:
    """Whether layers of a model, or of a stage of one, have adapters."""
    return any(_base_children(module) for module in model.modules())


def model_without_adapters(module: nn.Module) -> nn.Module:
    """Return the base model of a model with adapters."""
    found: Any = module
    return found.get_base_model() if is_peft_model(module) else module


def active_adapter(model: Any) -> str:
    """Return the name of the adapter that is trained; `enable_lora` calls its only one "default"."""
    return model.active_adapter if is_peft_model(model) else next(iter(model.peft_config))


def is_peft_model(module: nn.Module) -> bool:
    """Whether a module is a `peft.PeftModel`, without importing peft: where it is not loaded, nothing is one."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """Let peft learn names from the state of each module of `modules_to_save`, whose parameters may be in chunks."""
    saved = [copy for module in model.modules() for copy in saved_copies(module)]
    try:
        for module in saved:
            vars(module)["state_dict"] = partial(module.state_dict, keep_vars=True)
        yield
    finally:
        for module in saved:
            vars(module).pop("state_dict", None)


def saved_copies(module: nn.Module) -> list[nn.Module]:
    """Return the copies that are trained of a module that peft's `modules_to_save` names; nothing for others."""
    others, wrapper = sys.modules.get("peft.utils.other"), cast("Any", module)
    return list(wrapper.modules_to_save.values()) if others and isinstance(module, others.ModulesToSaveWrapper) else []


def _base_children(module: nn.Module | None) -> tuple[str, ...]:
    """Return the attribute names under which a module of peft holds the base layer; nothing for others."""
    layers, others = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
    if layers is not None and isinstance(module, layers.BaseTunerLayer):
        return ("base_layer",)
    if others is not None and isinstance(module, others.AuxiliaryTrainingWrapper):
        return ("original_module", "token_adapter")
    return ()


def _base_path(base: nn.Module, name: str) -> str | None:
    """Leave the modules of peft out of a name; None if it is that of an adapter."""
    module: Any = base
    path = []
    for part in name.split("."):
        children = _base_children(module)
        if not children:
            path.append(part)
        elif part not in children:
            return None
        module = getattr(module, part, None)
    return ".".join(path)
