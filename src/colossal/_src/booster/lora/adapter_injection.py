"""Adapters inside of a model: put in, found again, taken out."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from colossal.errors import ColossalError, ConfigError, UnsupportedError
from colossal.logging import get_dist_logger

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def require_peft() -> None:
    """Check that peft can be imported."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "LoRA needs the package peft. Found that it is not installed. In the clone, run: pip install -e '.[lora]'"
        ) from error


_HEADS_OF_PEFT = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""What peft adds to modules_to_save for a task, and writes into the saved configuration: names of any model's head."""


def inject_adapters(model: nn.Module, config: "LoraConfig") -> "PeftModel":
    """Freeze a model and add adapters to it, in place; the configuration stays as it is."""
    from peft import get_peft_model

    wanted = {option: _listed(getattr(config, option)) for option in ("target_modules", "modules_to_save")}
    try:
        with warnings.catch_warnings():
            # peft asks transformers for an attribute by its old name, about which a user can do nothing
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted: Any = get_peft_model(model, copy.deepcopy(config))
    except ColossalError:
        raise
    except Exception as error:
        raise ConfigError(
            f"LoRA needs layers of the model that peft can adapt. Found that peft rejects {type(model).__name__}: "
            f"{str(error).rstrip('. ')}. Choose target_modules from model.named_modules()."
        ) from error
    present = {"target_modules": adapted.targeted_module_names, "modules_to_save": _saved_modules(adapted)}
    wanted["target_modules"] = _without_experts(model, adapted, wanted["target_modules"])
    of_task = _HEADS_OF_PEFT.get(str(config.task_type), ())
    wanted["modules_to_save"] = [name for name in wanted["modules_to_save"] if name not in of_task]
    for option, names in wanted.items():
        if lost := [name for name in names if not any(_matches(each, name) for each in present[option])]:
            raise ConfigError(
                f"Every name in {option} must match a layer of the model. Found {lost}, which match no layer of "
                f"{type(model).__name__}. Choose from model.named_modules()."
            )
    return adapted


def _listed(names: object) -> list[str]:
    """Return names that must each match; a single string is a pattern, which peft checks by itself."""
    return sorted(names) if isinstance(names, (list, set, tuple)) else []


def _without_experts(model: nn.Module, adapted: Any, wanted: list[str]) -> list[str]:
    """Leave out names that peft replaced by those of stacked experts, and say which layers of these names it skips."""
    kept = adapted.peft_config[adapted.active_adapter].target_modules or ()
    replaced = [name for name in wanted if name not in kept]
    skipped = [name for name, _ in model.named_modules() if any(_matches(name, each) for each in replaced)]
    if skipped:
        get_dist_logger().warning(
            f"peft takes {replaced} of target_modules for the experts of {type(model).__name__}. Other layers of these "
            f"names stay frozen: {len(skipped)}, such as {skipped[0]}.",
            ranks=[0],
        )
    return [name for name in wanted if name in kept]


def _saved_modules(adapted: nn.Module) -> list[str]:
    from peft.utils import ModulesToSaveWrapper

    return [name for name, module in adapted.named_modules() if isinstance(module, ModulesToSaveWrapper)]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


@contextmanager
def restore_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the original layers of a model and their requires_grad, if the block raises."""
    modules = dict(model.named_modules())
    trainable = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    except BaseException:
        for name, module in modules.items():
            parent, _, leaf = name.rpartition(".")
            if leaf:
                setattr(modules[parent], leaf, module)
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad_(requires_grad)
        raise
