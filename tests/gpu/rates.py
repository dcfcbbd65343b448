"""What one device does alone: its memory, its matrix units, our fused Adam, and linear layers in float8."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from colossal.accelerator import get_accelerator

REPEATS = 15


def seconds_of(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median of several times, by the clock of the host, each until the device is done."""
    accelerator, taken = get_accelerator(), []
    for turn in range(repeats + 3):
        accelerator.synchronize()
        begin = time.perf_counter()
        work()
        accelerator.synchronize()
        taken += [time.perf_counter() - begin] if turn > 2 else []
    return statistics.median(taken)


def ceilings(is_toy: bool) -> Iterator[dict[str, float]]:
    """Yield ``copy_bytes_per_second``, read and written, and ``flops_per_second`` of a product in bfloat16."""
    device = get_accelerator().get_current_device()
    size = 128 if is_toy else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << (16 if is_toy else 28), device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
    yield {"copy_bytes_per_second": copied, "flops_per_second": 2 * size**3 / seconds_of(lambda: left @ right)}


def adam(optimizer: str, kind: str, is_toy: bool) -> Iterator[dict[str, float]]:
    """Yield ``bytes_per_second`` of a step of an optimizer over a billion bytes of parameters and more.

    Args:
        optimizer: ``"torch"`` for its fused AdamW, ``"HybridAdam"``.
        kind: ``"float32"``; ``"bfloat16"`` for parameters, gradients and states in it.
        is_toy: Few elements.
    """
    from colossal.nn.optimizer import HybridAdam

    device, dtype = get_accelerator().get_current_device(), getattr(torch, kind)
    number, count = (1 << 10, 4) if is_toy else (1 << 24, 24)
    parameters = [torch.nn.Parameter(torch.randn(number, device=device, dtype=dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    makers: dict[str, Callable[..., Any]] = {
        "torch": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        "HybridAdam": lambda params: HybridAdam(params, lr=1e-4),
    }
    made = makers[optimizer](parameters)
    seconds = seconds_of(made.step)
    states = [value for state in made.state.values() for value in state.values() if torch.is_tensor(value)]
    moved = 2 * sum(value.nbytes for value in states if value.numel() == number)
    moved += sum(2 * parameter.nbytes + parameter.nbytes for parameter in parameters)
    yield {"bytes_per_second": moved / seconds, "seconds": seconds}


def linear(kind: str, is_toy: bool) -> Iterator[dict[str, float]]:
    """Yield the ``seconds`` of forward and backward of a linear layer, and ``flops_per_second``.

    Args:
        kind: ``"bf16"`` or ``"fp8"``.
        is_toy: A small one.
    """
    from colossal._src.amp import FP8Linear, fp8_linear

    device, size = get_accelerator().get_current_device(), 64 if is_toy else 8192
    if kind == "fp8" and not fp8_linear.has_float8(device) and not is_toy:
        raise RuntimeError("needs a GPU with float8 units, of compute capability 8.9 or above")
    torch.manual_seed(0)
    layer = (FP8Linear if kind == "fp8" else torch.nn.Linear)(size, size).to(device)
    inputs = torch.randn(size, size, device=device, requires_grad=True)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            layer(inputs).sum().backward()

    seconds = seconds_of(step)
    yield {"seconds": seconds, "flops_per_second": 6 * size**3 / seconds}
