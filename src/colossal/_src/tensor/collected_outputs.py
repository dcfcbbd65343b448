"""Outputs that a model of transformers collects from its layers, such as hidden states of all of them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from colossal.errors import UnsupportedError

COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_collected_outputs(
    models: Iterable[Any], inputs: Any, found: str, advice: str, names: Collection[str] = COLLECTED
) -> None:
    """Refuse outputs of which a rank would have those of its own layers or tokens only.

    Args:
        models: Whose configurations may ask for them: a model, its stages, or what stands for all of it.
        inputs: What it is called with: keywords outweigh a configuration, as they do in transformers.
        found: What shards the model, as a sentence.
        advice: What to do, as a sentence.
        names: The keywords that are refused.

    Raises:
        UnsupportedError: The model is asked for such outputs.
    """
    given = cast("Mapping[str, Any]", inputs) if isinstance(inputs, Mapping) else dict[str, Any]()
    configs = [getattr(model, "config", None) for model in models]
    asked = [name for name in names if _is_asked(name, configs, given)]
    if asked:
        raise UnsupportedError(
            f"{' and '.join(asked)} collects outputs of all layers, tokens and heads, and of the losses made of them. "
            f"{found} {advice}"
        )


def _is_asked(name: str, configs: Iterable[Any], given: Mapping[str, Any]) -> bool:
    value = given.get(name)
    return any(getattr(config, name, False) for config in configs) if value is None else bool(value)
