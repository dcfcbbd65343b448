"""The one question about an optimizer that has shards: is its update of a shard the shard of its update?"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from colossal._src.tensor import local_of
from colossal.errors import UnsupportedError

_STEPS, _RATE, _TOLERANCE, _SHOWN = 2, 0.1, 1e-4, 0.01
_SHAPES = (((4, 6), (5,)), ((4, 6), (3, 5)))
"""What is tried first, and what is where an optimizer takes only matrices."""
_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")
"""Hyperparameters that choose a kernel for the same update."""

Split = Callable[[Sequence[torch.Tensor]], list[list[torch.Tensor]]]
"""Splits full tensors into what each of two ranks holds."""


AsParameter = Callable[[torch.Tensor], torch.Tensor]
"""Makes of a shard what the optimizer is given."""


def check_optimizer(
    optimizer: Optimizer, *, shards: bool, subsets: bool = False, as_parameter: AsParameter | None = None
) -> None:
    """Refuse an optimizer that would compute another update from what a rank has than one process computes.

    Optimizers of `colossal.nn.optimizer` declare support of shards by ``updates_shards``. Any other one is tried: a
    new one of the same class and hyperparameters updates small tensors, once in full, and once as two ranks would.
    """
    for each in getattr(optimizer, "optimizers", ()):  # of a CombinedOptimizer
        check_optimizer(each, shards=shards, subsets=subsets, as_parameter=as_parameter)
    if hasattr(optimizer, "optimizers"):
        return
    knows_shards = getattr(optimizer, "updates_shards", None)
    if not (shards or subsets) or (knows_shards and not subsets):
        return
    trials: list[tuple[Split, AsParameter]] = [(_in_ranges, _identity)] if shards and not knows_shards else []
    trials += [(_in_ranges, as_parameter)] if trials and as_parameter is not None else []
    trials += [(_by_tensor, _identity)] if subsets else []
    kinds = {repr(without_params(group)): group for group in optimizer.param_groups}
    for group in kinds.values():
        device = next((each.device for each in group["params"] if not each.is_meta), torch.device("cpu"))
        arguments = arguments_of(optimizer, group)
        reasons = (_incorrect_because(type(optimizer), arguments, device, *trial) for trial in trials)
        if (reason := next(filter(None, reasons), None)) is not None:
            raise UnsupportedError(
                f"A rank has {'shards of the' if shards else 'only some of the'} parameters here. Found "
                f"{type(optimizer).__name__}, {reason}. Take an optimizer that updates each element by itself, such as "
                "torch.optim.AdamW or colossal.nn.optimizer.HybridAdam, or one of colossal.nn.optimizer that sums over "
                "full parameters, such as Lamb or DistributedAdaFactor, or TorchDDPPlugin on a mesh with only dp. If "
                "the optimizer does support shards, declare it by updates_shards = True in its class."
            )


def without_params(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def arguments_of(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """What builds an optimizer with the hyperparameters of a group; the learning rate may be 0 now, and not later."""
    known = inspect.signature(type(optimizer)).parameters
    hyperparameters = {name: value for name, value in without_params(group).items() if name in known}
    hyperparameters |= {"lr": _RATE} if hyperparameters.get("lr") is not None else {}
    return {name: value for name, value in hyperparameters.items() if name not in _IMPLEMENTATIONS}


def _incorrect_because(
    kind: type[Optimizer], arguments: dict[str, Any], device: torch.device, split: Split, as_parameter: AsParameter
) -> str | None:
    """Return why an optimizer is wrong on what ranks have; None if it is right."""

    def update(
        values: Iterable[torch.Tensor], grads: Iterable[Sequence[torch.Tensor]], made: AsParameter = as_parameter
    ) -> list[torch.Tensor]:
        # a copy, as the optimizer changes it in place and the values serve each trial
        params = [torch.nn.Parameter(made(value.to(device, copy=True))) for value in values]
        optimizer = kind(params, **arguments)
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = made(grad.to(device, copy=True))
            optimizer.step()
        return [local_of(param.detach()).cpu() for param in params]

    reason = ""
    for shapes in _SHAPES:
        # not the generator that the program draws from
        draws = torch.Generator("cpu").manual_seed(0)
        values, *grads = (
            [torch.randn(shape, generator=draws, device="cpu") for shape in shapes] for _ in range(1 + _STEPS)
        )
        try:
            full = update(values, grads, _identity)
            ranks = zip(split(values), zip(*map(split, grads), strict=True), split(full), strict=True)
            pairs = [pair for shards, steps, new in ranks for pair in zip(update(shards, steps), new, strict=True)]
        except Exception as error:  # noqa: BLE001 (any error of a third-party optimizer on these tensors)
            failed = f"which cannot be tried on shards ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            reason = reason or failed
            continue
        moved = max(float((new - old).abs().max()) for new, old in zip(full, values, strict=True))
        error = max(float((found - expected).abs().max()) for found, expected in pairs)
        if error <= _TOLERANCE * moved:
            return None
        relative_error = error / max(moved, 1e-30)
        differs = f"{relative_error:.0%}" if relative_error >= _SHOWN else f"less than {_SHOWN:.0%}"
        return f"whose update then is not that of one process: in a trial it differed by {differs}"
    return reason


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _in_ranges(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Ranges of the elements of each tensor."""
    # of different lengths, and not at the end of a row: an optimizer that looks at rows or halves must show
    halves = [tensor.reshape(-1).tensor_split([tensor.numel() // 2 - 1]) for tensor in tensors]
    return [list(rank) for rank in zip(*halves, strict=True)]


def _by_tensor(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """One tensor for each rank."""
    return [[tensor] for tensor in tensors]
