"""Keys and values of earlier tokens that a program gives to a model of which a rank has only some."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from colossal.errors import UnsupportedError

_PAST = "past_key_values"


def refuse_given_cache(inputs: object, found: str, advice: str, num_heads: int | None = None) -> None:
    """Refuse keys and values that are not those of this rank's layers, tokens and heads. An empty cache is not refused.

    Args:
        inputs: What the model is called with.
        found: What shards the model, as a sentence.
        advice: What to do, as a sentence.
        num_heads: Refuse a cache of as many heads only; any by default.

    Raises:
        UnsupportedError: The inputs have such a cache.
    """
    given = cast("Mapping[str, Any]", inputs).get(_PAST) if isinstance(inputs, Mapping) else None
    if given is None:
        return
    layers = getattr(getattr(given, "self_attention_cache", given), "layers", ())
    keys = [each for each in (getattr(layer, "keys", None) for layer in layers) if isinstance(each, torch.Tensor)]
    heads = {each.shape[1] for each in keys if each.numel()}
    if heads and num_heads in (None, *heads):
        raise UnsupportedError(
            f"Attention of a sharded model takes keys and values of what each rank has. Found {_PAST} with "
            f"{max(heads)} heads of keys. {found} {advice}"
        )
