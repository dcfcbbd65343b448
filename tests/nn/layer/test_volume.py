"""What a linear layer sends, computes and holds in each mode: exactly what its formula says, for many shapes."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.nn import Linear, split_input
from colossal.testing import fake_world

SHAPES = (
    (64, 64, 64),
    (64, 64, 256),
    (64, 256, 64),
    (128, 64, 128),
    (128, 128, 64),
    (256, 64, 64),
    (64, 128, 512),
    (64, 512, 128),
    (512, 64, 256),
    (64, 256, 256),
)
"""Tokens, features before the layer, and behind it."""
BYTES = 4


def sent_1d(m: int, k: int, n: int, tp: int) -> float:
    """All-reduce of the input's gradient behind a layer that makes more features, of the output before any other."""
    return 2 * (tp - 1) / tp * m * min(k, n)


def sent_2d(m: int, k: int, n: int, q: int, depth: int = 1) -> float:
    """The smaller one of input and output, and the weight, three times each; its gradient once more along depth."""
    panels = 3 * (q - 1) / q * (m / depth * min(k, n) + k * n) / q
    return panels + 2 * (depth - 1) / depth * k * n / q**2


def sent_3d(m: int, k: int, n: int, q: int) -> float:
    """Input, weight and output, both ways, and 1 / q of the output."""
    return 2 * (q - 1) / q * (m * k + k * n + m * n * (1 + 1 / q)) / q**2


MODES: dict[str, tuple[dict[str, object], int, Callable[[int, int, int], float]]] = {
    "1d, 2": ({}, 2, lambda m, k, n: sent_1d(m, k, n, 2)),
    "1d, 8": ({}, 8, lambda m, k, n: sent_1d(m, k, n, 8)),
    "2d, 2x2": ({"tp_mode": "2d"}, 4, lambda m, k, n: sent_2d(m, k, n, 2)),
    "2d, 4x4": ({"tp_mode": "2d"}, 16, lambda m, k, n: sent_2d(m, k, n, 4)),
    "2.5d, 2x2x2": ({"tp_mode": "2.5d", "tp_depth": 2}, 8, lambda m, k, n: sent_2d(m, k, n, 2, 2)),
    "2.5d, 4x2x2": ({"tp_mode": "2.5d", "tp_depth": 4}, 16, lambda m, k, n: sent_2d(m, k, n, 2, 4)),
    "3d, 2x2x2": ({"tp_mode": "3d"}, 8, lambda m, k, n: sent_3d(m, k, n, 2)),
    "3d, 4x4x4": ({"tp_mode": "3d"}, 64, lambda m, k, n: sent_3d(m, k, n, 4)),
}


@pytest.mark.parametrize("mode", MODES)
def test_bytes_operations_and_parameters(mode) -> None:
    options, tp, sent = MODES[mode]
    for m, k, n in SHAPES:
        with fake_world(tp, rank=tp - 1), ParallelMesh(tp=tp, **options):  # type: ignore[arg-type]
            layer = Linear(k, n, bias=False)
            x = split_input(torch.zeros(m, k)).requires_grad_()
            # a row-parallel layer takes what a column-parallel one has cut
            x = x.detach()[:, : layer.weight.shape[1]].requires_grad_()
            with CommCounter() as counter, FlopCounterMode(display=False) as flops:
                layer(x).sum().backward()
        found = sum(counter.bytes.values())
        assert found == BYTES * sent(m, k, n), (mode, m, k, n)
        assert flops.get_total_flops() == 3 * 2 * m * k * n // tp, (mode, m, k, n)
        copies = options.get("tp_depth", 1)
        assert layer.weight.numel() == k * n * copies // tp, (mode, m, k, n)  # type: ignore[operator]
