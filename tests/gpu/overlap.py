"""What of communication and of copies between host and device lies beside computation, from a trace of the device."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from models import FULL, TOY, batches
from training import ours, plugin_of

from colossal.accelerator import get_accelerator

Span = tuple[float, float]
KINDS = ("nccl", "HtoD", "DtoH")
"""Beginnings or parts of what kernels and copies are called; all else computes."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LowLevelZeroPlugin, stage 2": ("LowLevelZeroPlugin", {"stage": 2, "precision": "bf16"}),
    "LowLevelZeroPlugin, offloaded": ("LowLevelZeroPlugin", {"stage": 2, "precision": "bf16", "cpu_offload": True}),
    "GeminiPlugin, from the host": (
        "GeminiPlugin",
        {"precision": "bf16", "placement_policy": "cpu", "pin_memory": True},
    ),
    "TorchDDPPlugin": ("TorchDDPPlugin", {}),
}


def joined(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Add up spans that do not touch."""
    return sum(end - begin for begin, end in spans)


def shared(first: list[Span], second: list[Span]) -> float:
    """Return how long both are at work."""
    return length(first) + length(second) - length(joined([*first, *second]))


def trace(name: str, is_toy: bool) -> Iterator[dict[str, float]]:
    """Yield, of two steps, seconds of each kind, and which share of them lies beside computation."""
    kind, options = CASES[name]
    shape = TOY if is_toy else FULL
    step = ours(plugin_of(kind, **options), shape)
    accelerator = get_accelerator()
    data = batches(shape, accelerator.get_current_device())
    for _ in range(3):
        step(next(data))
    accelerator.synchronize()
    with torch.profiler.profile() as profiler:
        for _ in range(2):
            step(next(data))
        accelerator.synchronize()
    spans: dict[str, list[Span]] = {"computation": []}
    for event in profiler.events() or ():
        is_named_range = getattr(event, "is_user_annotation", False)  # such as that of a whole optimizer's step
        if event.device_type != torch.autograd.DeviceType.CPU and not is_named_range:
            of_kind = next((kind for kind in KINDS if kind in event.name), "computation")
            spans.setdefault(of_kind, []).append((event.time_range.start, event.time_range.end))
    whole = {kind: joined(each) for kind, each in spans.items()}
    seconds = {f"{kind} seconds": length(each) / 1e6 for kind, each in whole.items()}
    beside = {
        f"{kind} beside computation": shared(each, whole["computation"]) / length(each)
        for kind, each in whole.items()
        if kind != "computation" and each
    }
    yield seconds | beside
