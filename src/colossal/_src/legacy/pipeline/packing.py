"""Objects with tensors in them, as tensors only: what two ranks of a pipeline send to each other."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from colossal.errors import UnsupportedError

_PLAIN = (bool, int, float, str, type(None))


def pack(value: Any, device: torch.device | None = None) -> tuple[torch.Tensor, ...]:
    """Turn an object into a description, as bytes in a tensor, and the tensors in it."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(_describe(value, tensors))
    where = device or (tensors[0].device if tensors else torch.device("cpu"))
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=where), *tensors


def unpack(parts: Sequence[torch.Tensor]) -> Any:
    """Make the object again from what `pack` returned."""
    return _rebuild(json.loads(bytes(parts[0].tolist())), parts[1:])


def _describe(value: Any, tensors: list[torch.Tensor]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, _PLAIN):
        return ["plain", value]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        if all(isinstance(key, str) for key in items):
            return ["dict", [[key, _describe(each, tensors)] for key, each in items.items()]]
    elif isinstance(value, list | tuple):
        found = [_describe(each, tensors) for each in cast("Sequence[Any]", value)]
        return ["list" if isinstance(value, list) else "tuple", found]
    raise UnsupportedError(
        "Ranks of a pipeline send tensors, numbers, texts, None, and lists, tuples and dicts with texts as keys of "
        f"them; no other object is pickled. Found {type(value).__name__}. Send what it consists of."
    )


def _rebuild(description: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind, content = description
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _rebuild(each, tensors) for key, each in content}
    if kind in ("list", "tuple"):
        found = [_rebuild(each, tensors) for each in content]
        return found if kind == "list" else tuple(found)
    return content
