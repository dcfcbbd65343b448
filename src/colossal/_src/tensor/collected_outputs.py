"""Outputs that a model of transformers collects from its layers, such as hidden states of all of them."""

from collections.abc import Collection, Mapping
from typing import Any, cast

from torch import nn

from colossal.errors import UnsupportedError

COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_collected_outputs(
    model: nn.Module, inputs: Any, found: str, advice: str, names: Collection[str] = COLLECTED
) -> None:
    """Refuse outputs of which a rank would have those of its own layers or tokens only.

    Args:
        model: A model, or a stage of one.
        inputs: What it is called with: keywords outweigh its configuration, as they do in transformers.
        found: What shards the model, as a sentence.
        advice: What to do, as a sentence.
        names: The keywords that are refused.

    Raises:
        UnsupportedError: The model is asked for such outputs.
    """
    given = cast("Mapping[str, Any]", inputs) if isinstance(inputs, Mapping) else dict[str, Any]()
    asked = [name for name in names if _is_asked(name, getattr(model, "config", None), given)]
    if asked:
        raise UnsupportedError(
            f"{' and '.join(asked)} collects outputs of all layers, tokens and heads, and of the losses made of them. "
            f"{found} {advice}"
        )


def _is_asked(name: str, config: Any, given: Mapping[str, Any]) -> bool:
    value = given.get(name)
    return bool(getattr(config, name, False) if value is None else value)
