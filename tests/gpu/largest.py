"""The largest GPT-2 of which a plugin trains a step on the devices that there are."""

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import TOY, Shape, batches
from training import ours, plugin_of, torch_alone
from worlds import WorldError, once

from colossal.accelerator import get_accelerator

WIDE = Shape(width=2048, layers=1, batch=1)
CASES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "torch, no communication": None,
    "TorchFSDPPlugin": ("TorchFSDPPlugin", {}),
    "TorchFSDPPlugin, offloaded": ("TorchFSDPPlugin", {"cpu_offload": True}),
    "LowLevelZeroPlugin": ("LowLevelZeroPlugin", {"stage": 2, "precision": "bf16"}),
    "LowLevelZeroPlugin, offloaded": ("LowLevelZeroPlugin", {"stage": 2, "precision": "bf16", "cpu_offload": True}),
    "GeminiPlugin": ("GeminiPlugin", {"precision": "bf16", "placement_policy": "auto"}),
    "GeminiPlugin, from the host": ("GeminiPlugin", {"precision": "bf16", "placement_policy": "cpu"}),
}
SMALL, RESERVED, MOST = (4, 12), 0.9, 400
"""Numbers of blocks that are measured; which share of a memory the first guess takes; and most blocks."""


def attempt(name: str, layers: int, is_toy: bool) -> Iterator[dict[str, float]]:
    """Train two steps.

    Yields:
        ``parameters``, ``peak_bytes`` of the device, ``host_bytes`` of the process at their highest.
    """
    shape = replace(TOY if is_toy else WIDE, layers=layers)
    case = CASES[name]
    step = torch_alone(shape) if case is None else ours(plugin_of(case[0], **case[1]), shape, is_lazy=True)
    accelerator = get_accelerator()
    device = accelerator.get_current_device()
    data = batches(shape, device)
    for _ in range(2):
        step(next(data))
    accelerator.synchronize()
    yield {
        "parameters": float(shape.num_parameters),
        "peak_bytes": float(accelerator.max_memory_allocated()),
        "host_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }


def room(device: str, size: int) -> dict[str, float]:
    """Bytes that a rank may take of its device, and of the host."""
    import torch

    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / size
    return {"peak_bytes": float(torch.cuda.mem_get_info()[1]) if device == "cuda" else host, "host_bytes": host}


def search(name: str, is_toy: bool, folder: Path, size: int, device: str, seconds: float) -> dict[str, float]:
    """Guess by two small models, and take less until it fits.

    Returns:
        ``parameters`` of the largest that trained, ``layers``, ``peak_bytes``.
    """

    def run(layers: int) -> dict[str, float]:
        arguments = {"name": name, "layers": layers, "is_toy": is_toy}
        return max(once("largest:attempt", arguments, folder, size, device, seconds), key=lambda one: one["peak_bytes"])

    small, larger = (run(layers) for layers in SMALL)
    fits = guess = SMALL[1]
    for kind, total in room(device, size).items():
        of_block = max((larger[kind] - small[kind]) / (SMALL[1] - SMALL[0]), 1.0)
        most = fits + int((RESERVED * total - larger[kind]) / of_block)
        guess = most if guess == fits else min(guess, most)
    return search_down(run, min(guess, 2 * fits if is_toy else MOST), fits, larger)


def search_down(
    run: Callable[[int], dict[str, float]], guess: int, fits: int, found: dict[str, float]
) -> dict[str, float]:
    """Try a number of blocks, and between it and what is known to fit, four times at most."""
    for _ in range(4):
        if guess <= fits:
            break
        try:
            found, fits = run(guess), guess
            break
        except WorldError as error:
            if error.kind != "OutOfMemoryError":
                raise
            guess = fits + (guess - fits) * 3 // 4
    return {"parameters": found["parameters"], "layers": float(fits), "peak_bytes": found["peak_bytes"]}
