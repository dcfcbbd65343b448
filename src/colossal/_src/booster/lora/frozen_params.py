"""What the optimizer of a model with adapters holds: what is trained, and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossal._src.interface import Parts, is_peft_model
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger

_ADAPTER_NAME_PARTS = ("lora_", "modules_to_save")  # parts of the names of what peft adds
_PER_PARAM_KEYS = ("params", "param_names")  # what a group has of each parameter, in addition to its options


def drop_frozen_params(parts: Parts) -> None:
    """Keep only the trainable parameters in the optimizer of a model with adapters, in place.

    Frozen parameters never get a gradient, but would be listed in each checkpoint of the optimizer and copied by a
    precision that keeps copies in float32. A model without adapters keeps its frozen parameters: it may thaw them.

    An optimizer that was built before the adapters holds none of them. They join it in the order of the model, if it
    says in one way only how parameters are updated.
    """
    if parts.optimizer is None or not is_peft_model(parts.model):
        return
    held = {parameter for group in parts.optimizer.param_groups for parameter in group["params"]}
    named = dict(parts.model.named_parameters())
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    missing = set(trained) - held
    if held - set(trained) and missing:
        adapters = {each for name, each in named.items() if any(part in name for part in _ADAPTER_NAME_PARTS)}
        if held & adapters or held - set(named.values()):
            raise ConfigError(
                f"The optimizer updates the adapters of the model. Found {len(held - set(trained))} parameters in it "
                f"that are frozen or gone, and {len(missing)} adapters missing. Build the optimizer after enable_lora, "
                "from the parameters of the model that it returns."
            )
        _add_adapters_to_optimizer(
            parts.optimizer, trained, {each: name for name, each in named.items() if each in missing}
        )
    for group in parts.optimizer.param_groups:
        _set_group_params(group, [parameter for parameter in group["params"] if parameter.requires_grad], {})


def _add_adapters_to_optimizer(
    optimizer: Optimizer, trained: Sequence[nn.Parameter], missing: Mapping[nn.Parameter, str]
) -> None:
    """Put adapters, which have names, into the first group, in the order in which the model has them."""
    first, *others = optimizer.param_groups
    for index, group in enumerate(others, 1):
        differing = [
            name for name in {**first, **group} if name not in _PER_PARAM_KEYS and group.get(name) != first.get(name)
        ]
        if differing:
            values = ", ".join(f"{name}={first.get(name)!r} and {group.get(name)!r}" for name in differing)
            raise ConfigError(
                "Adapters join an optimizer that was built before enable_lora if all its groups have the same options. "
                f"Found groups 0 and {index} with {values}, and {len(missing)} parameters of "
                "adapters that may belong to either. Build the optimizer after enable_lora, with a group for them."
            )
    frozen = {each for group in optimizer.param_groups for each in group["params"] if not each.requires_grad}
    get_dist_logger().info(
        f"The optimizer was built before the adapters: {len(missing)} parameters of these join its first group, "
        f"and {len(frozen)} that are frozen now leave it",
        ranks=[0],
    )
    here = {*first["params"], *missing}
    _set_group_params(first, [parameter for parameter in trained if parameter in here], missing)
    for parameter in frozen:
        optimizer.state.pop(parameter, None)


def _set_group_params(group: dict[str, Any], parameters: list[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    """Replace the parameters of a group, which keeps its names or gets new ones."""
    if "param_names" in group:
        known = {**names, **dict(zip(group["params"], group["param_names"], strict=True))}
        group["param_names"] = [known[parameter] for parameter in parameters]
    group["params"] = parameters
