"""Ranks that build a model lazily, each by itself, and shall get the same values."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from colossal._src.lazy.recipe import Constant, Recipe, RecordedOperation, View
from colossal._src.lazy.stored_tensor import StoredTensor
from colossal._src.lazy.tensor import LazyTensor, view_of


def recorded_operations(tensors: Iterable[LazyTensor]) -> list[RecordedOperation]:
    """Find all operations that the values of tensors come from."""
    waiting, seen = deque(view_of(each).recipe for each in tensors), set[Recipe]()
    found: dict[RecordedOperation, None] = {}
    while waiting:
        recipe = waiting.popleft()
        if recipe not in seen:
            seen.add(recipe)
            found |= dict.fromkeys(recipe.writes)
            waiting += [view.recipe for write in recipe.writes for view in _inputs(write, View)]
    return list(found)


def describe_operation(operation: RecordedOperation) -> str:
    """Say what an operation does, but for what it draws and where a file is."""
    name = operation.func.name if isinstance(operation.func, StoredTensor) else str(operation.func)
    sizes = [tuple(view.meta.shape) for view in (*operation.made.values(), *_inputs(operation, View))]
    constants = [constant.digest for constant in _inputs(operation, Constant)]
    state = None if operation.draw is None else operation.draw.state.numel()
    return f"{name} {sizes} {constants} {state}"


def rng_states_of(operations: Iterable[RecordedOperation]) -> list[torch.Tensor]:
    """Find the states of random generators that operations draw from."""
    return [operation.draw.state for operation in operations if operation.draw is not None]


def _inputs(operation: RecordedOperation, kind: type[Any]) -> list[Any]:
    return [each for each in tree_leaves((operation.args, operation.kwargs)) if isinstance(each, kind)]
