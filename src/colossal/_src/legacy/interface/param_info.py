"""What an optimizer knew of its parameters before a plugin changed them."""

from typing import Any

from torch.optim import Optimizer


def get_param_info(optim: Optimizer | None) -> dict[str, Any]:
    """Record the parameters of an optimizer by their numbers, before they are sharded.

    Boosted optimizers need no such record.

    Args:
        optim: The optimizer; None for no record.

    Returns:
        ``param_groups``, in which numbers stand for parameters, ``param2id`` and ``id2param`` from and to the identity
        of each one in this process, and ``param2shape`` with its shape by the same; empty without an optimizer.

    Example:
        >>> import torch
        >>> from colossal.legacy.interface import get_param_info
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> info = get_param_info(torch.optim.SGD([weight], lr=0.1))
        >>> info["param_groups"][0]["params"], info["param2id"] == {id(weight): 0}, info["param2shape"][id(weight)]
        ([0], True, torch.Size([2, 3]))
    """
    if optim is None:
        return {}
    groups: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}
    shapes: dict[int, Any] = {}
    for group in optim.param_groups:
        params = group["params"]
        shapes.update((id(each), each.shape) for each in params)
        own = {id(each): number for number, each in enumerate(params, start=len(numbers))}
        numbers.update(own)
        groups.append({**group, "params": list(own.values())})
    return {
        "param_groups": groups,
        "param2id": numbers,
        "id2param": {number: identity for identity, number in numbers.items()},
        "param2shape": shapes,
    }
