"""Methods of a user's own model that need what no rank has, or that this rank has only a part of."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, final

import torch
from torch import nn

from colossal._src.interface.adapter_names import model_without_adapters
from colossal._src.interface.full_spec import full_spec_of
from colossal.errors import ColossalError, UnsupportedError

SAVE_AND_GENERATE = (
    "Save it by booster.save_model(model, directory, shard=True, use_safetensors=True), and generate with what "
    "from_pretrained(directory) loads."
)
"""What to do instead of `generate`."""

SAVE_AND_MERGE = (
    "Save it by booster.save_model(model, directory, shard=True, use_safetensors=True) on all ranks, and merge in one "
    'process: PeftModel.from_pretrained(base, f"{directory}/adapter").merge_and_unload(), where base is what '
    "from_pretrained(directory) loads."
)
"""What to do instead of `merge_and_unload`."""

_JOIN = (
    "torch.distributed.algorithms.Join is for ranks with different numbers of batches. Give all ranks as many, by "
    "plugin.prepare_dataloader, or agree on the smallest number by an all_reduce"
)


@final
class Refusal:
    """Takes the place of a method, and raises an error when it is called."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Say what to do instead."""
        raise UnsupportedError(self.message)


def refuse(models: Iterable[nn.Module], name: str, message: str) -> None:
    """Reject a method of models, which some of them may not have."""
    for model in models:
        vars(model)[name] = Refusal(message)


def refusal_of(model: nn.Module, name: str) -> str:
    """Return why a method is rejected; empty if it is not."""
    found = vars(model).get(name)
    return found.message if isinstance(found, Refusal) else ""


def lift_refusals(model: nn.Module) -> None:
    """Give a model back what was rejected, such as a copy with full parameters."""
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, Refusal)]:
            del vars(module)[name]


def attribute_hint(original: nn.Module, name: str) -> str:
    """Say how to access an attribute of the original model that the boosted one does not have."""
    if name == "join_hook":
        return _JOIN
    base = model_without_adapters(original)
    # methods of transformers have some of the same names, and know nothing of adapters that peft has made
    for own in (original, base) if "adapter" in name else (base, original):
        if refused := refusal_of(own, name):
            return refused
        if hasattr(own, name):
            keep_peft = "" if own is base else "unwrap_peft=False"
            return f"The model that was boosted has it: use model.unwrap({keep_peft}).{name}"
    full_spec = full_spec_of(original)
    return "" if full_spec is None else stage_hint(full_spec.roots, name)


def stage_hint(roots: Sequence[nn.Module], name: str) -> str:
    """Say how to access an attribute of a model in stages; empty if the model does not have it."""
    if name.startswith("__") or not any(hasattr(root, name) for root in roots):
        return ""
    hint = f"The model is partitioned into pipeline stages: use {name} of the model before it is boosted"
    if not isinstance(getattr(roots[0], name), nn.Module):
        return hint
    return (
        f"{hint}; or model.unwrap().stages[0].module.{name}, with the layers of this rank. Files that "
        "booster.save_model(model, directory) writes have all of them"
    )


def refuse_tracing(gatherer: str) -> None:
    """Refuse to record a pass by torch.jit.trace, where it reads gathered copies that are freed afterwards.

    Raises:
        UnsupportedError: A pass is being recorded.
    """
    if torch._C._get_tracing_state() is not None:  # noqa: SLF001 (torch.jit.is_tracing() takes three calls for it)
        raise UnsupportedError(
            f"{gatherer} frees the full parameters after a forward pass, so that one cannot be recorded with them. "
            "Found a boosted model in torch.jit.trace. On all ranks take state = model.state_dict(only_rank_0=False), "
            "load it into a model that is not boosted, and trace that one."
        )


def explain_transform(error: RuntimeError) -> None:
    """Say what to do about an error of a forward pass that torch.func transforms, where the plugin communicates.

    Raises:
        UnsupportedError: It does, and the error is not one of this library.
    """
    inside: Any = torch
    stack = inside._C._functorch.peek_interpreter_stack()  # noqa: SLF001 (it has no public name)
    if stack is None or isinstance(error, ColossalError):
        return
    raise UnsupportedError(
        "torch.func transforms what a model computes, and not what its ranks send. Found a forward pass of a boosted "
        "model in a function that torch.func transforms, such as by jacrev or jvp, which ended in an error: "
        f"{str(error).partition(chr(10))[0]}. Under TorchDDPPlugin and LowLevelZeroPlugin transform the model that was "
        "boosted, as torch.func.jacrev(model.unwrap()), and call booster.backward(loss, optimizer), which reduces the "
        "gradients of parameters."
    ) from error
