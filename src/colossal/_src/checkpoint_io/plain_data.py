"""Plain data as JSON, with its tensors taken out: what a checkpoint holds in addition to tensors, without pickle."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colossal.errors import CheckpointError

_SCALARS = (bool, int, float, str, type(None))
_TAGS = ("$tensor", "$tuple", "$dict", "$set", "$counter", "$dtype")
_SEPARATOR = "/"


def extract_tensors(tree: Any, path: tuple[str, ...] = ()) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take the tensors out of plain data."""
    tensors: dict[str, torch.Tensor] = {}
    return _dismantle(tree, path, tensors), tensors


def insert_tensors(skeleton: Any, tensor: Callable[[str], Any]) -> Any:
    """Put the tensors back."""
    if isinstance(skeleton, list):
        return [insert_tensors(item, tensor) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag, value = next(iter(skeleton.items()), ("", ""))
    if tag not in _TAGS:
        return {key: insert_tensors(item, tensor) for key, item in skeleton.items()}
    if tag == "$tensor":
        return tensor(value)
    if tag == "$dtype":
        return getattr(torch, value)
    items = [insert_tensors(item, tensor) for item in value]
    return {"$tuple": tuple, "$dict": dict, "$set": set, "$counter": _count}[tag](items)


def _dismantle(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = _SEPARATOR.join(path)
        tensors[name] = value
        return {"$tensor": name}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) in (dict, OrderedDict, Counter):
        return _dismantle_mapping(value, path, tensors)
    if type(value) in (list, tuple, set):
        items = [_dismantle(item, (*path, str(place)), tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"$set" if isinstance(value, set) else "$tuple": items}
    raise CheckpointError(
        "A checkpoint can hold tensors and plain data: numbers, strings, lists and dicts of them. Found a "
        f"{type(value).__name__} at {_SEPARATOR.join(path) or 'the top'}. Keep functions and objects out of the state."
    )


def _dismantle_mapping(value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    pairs = [(key, _dismantle(item, (*path, str(key)), tensors)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [list(pair) for pair in pairs]}
    return as_mapping(pairs)


def as_mapping(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Write a dict whose values are taken apart already."""
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [[_dismantle(key, (), {}), item] for key, item in pairs]}


def _count(pairs: list[list[Any]]) -> Counter[Any]:
    return Counter(dict(pairs))
