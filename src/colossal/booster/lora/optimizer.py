"""What the optimizer of a model with adapters holds: what is trained, and nothing else."""

from colossal.booster.boosted import Parts
from colossal.errors import ConfigError
from colossal.interface import is_peft_model


def leave_frozen_out(parts: Parts) -> None:
    """Take the frozen parameters of a model with adapters out of its optimizer, in place.

    Frozen parameters never get a gradient, but would be listed in each checkpoint of the optimizer and copied by a
    precision that keeps copies in float32. A model without adapters keeps its frozen parameters: it may thaw them.

    Args:
        parts: As the user built them.

    Raises:
        ConfigError: The optimizer was built before the adapters, so that it would train nothing.
    """
    if parts.optimizer is None or not is_peft_model(parts.model):
        return
    held = {parameter for group in parts.optimizer.param_groups for parameter in group["params"]}
    trained = {parameter for parameter in parts.model.parameters() if parameter.requires_grad}
    if held - trained and trained - held:
        raise ConfigError(
            f"The optimizer updates the adapters of the model. Found {len(held - trained)} parameters in it that are "
            f"frozen or gone, and {len(trained - held)} adapters missing: it was built before them. Build the "
            "optimizer after enable_lora, from the parameters of the model that it returns."
        )
    for group in parts.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
