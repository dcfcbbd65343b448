# pyright: reportAttributeAccessIssue=false
"""``apex.amp`` as documented: initialize, scale_loss, master_params, state_dict, load_state_dict."""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WINDOW = 4
"""Steps without an overflow after which the scale doubles; 2000 in apex."""

calls: list[dict[str, Any]] = []
_scaler: dict[str, Any] = {}


def initialize(models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", **options: Any) -> Any:
    """Patch the model in place, and put masters into the groups of the optimizer at level O2."""
    assert enabled
    calls.append({"opt_level": opt_level, **options})
    scale = options["loss_scale"]
    _scaler.update(
        dynamic=scale in (None, "dynamic") and opt_level in {"O1", "O2"},
        loss_scale=2.0**16 if scale in (None, "dynamic") else float(scale),
        unskipped=0,
        low=options["min_loss_scale"] or 0.0,
        high=options["max_loss_scale"],
    )
    if opt_level in {"O0", "O3"} and scale is None:
        _scaler["loss_scale"] = 1.0
    inner = models.forward
    if opt_level == "O1":
        models.forward = functools.partial(_autocast, inner)
    elif opt_level != "O0":
        if optimizers is not None:
            _make_masters(optimizers) if opt_level == "O2" else None
        models.half()
        models.forward = functools.partial(_half, inner)
    return models if optimizers is None else (models, optimizers)


def _autocast(forward: Any, *args: Any) -> Any:
    with torch.autocast("cpu", torch.float16):
        return forward(*args)


def _half(forward: Any, *args: Any) -> Any:
    return forward(*(arg.half() for arg in args)).float()


def _make_masters(optimizer: torch.optim.Optimizer) -> None:
    optimizer.stash = []
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            master = nn.Parameter(parameter.detach().clone().float())
            optimizer.stash.append((parameter, master))
            group["params"][place] = master
    step = optimizer.step

    def step_and_copy(self: torch.optim.Optimizer, closure: Any = None) -> None:
        step(closure)
        for parameter, master in self.stash:
            parameter.data.copy_(master.data)

    optimizer.step = types.MethodType(step_and_copy, optimizer)


@contextlib.contextmanager
def scale_loss(loss: torch.Tensor, optimizers: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the scaled loss, then unscale what the backward pass added, and have the next step skipped if it is bad."""
    held = list(master_params(optimizers))
    kept = {master: master.grad for master in held}
    pairs = getattr(optimizers, "stash", [(parameter, parameter) for parameter in held])
    for parameter, _ in pairs:
        parameter.grad = None
    yield loss.float() * _scaler["loss_scale"]
    bad = False
    for parameter, master in pairs:
        if parameter.grad is None:
            master.grad = kept[master]
            continue
        bad |= not parameter.grad.isfinite().all()
        grad = parameter.grad.float() / _scaler["loss_scale"]
        parameter.grad = None
        master.grad = grad if kept[master] is None else kept[master] + grad
    if _update(bad):
        _skip_next(optimizers)


def _update(bad: bool) -> bool:
    if bad and _scaler["dynamic"]:
        _scaler.update(loss_scale=max(_scaler["low"], _scaler["loss_scale"] / 2), unskipped=0)
        return True
    _scaler["unskipped"] += 1
    if _scaler["unskipped"] == WINDOW and _scaler["dynamic"]:
        _scaler.update(loss_scale=min(_scaler["high"], _scaler["loss_scale"] * 2), unskipped=0)
    return False


def _skip_next(optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "patched", False):
        return
    step, optimizer.patched = optimizer.step, True

    def skip(closure: Any = None) -> None:
        del closure
        optimizer.step, optimizer.patched = step, False

    optimizer.step = skip


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield what the optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict() -> dict[str, Any]:
    """Return scale and counter of each loss."""
    return {"loss_scaler0": {name: _scaler[name] for name in ("loss_scale", "unskipped")}}


def load_state_dict(state: dict[str, Any]) -> None:
    """Continue from a state."""
    _scaler.update(state["loss_scaler0"])
