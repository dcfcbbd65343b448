"""A model and its batches for each plugin, in float64: a Llama for those that divide layers, else two layers."""

from typing import Any

import torch
from families import build
from torch import nn

DIVIDING = ("tp2", "pp2", "Gemini, tp2")
BATCHES = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
_IDS = (torch.arange(48) * 7 % 31).view(2, 4, 6)


def net(plugin: str) -> Any:
    """Build a model with the same values on each call."""
    if plugin in DIVIDING:
        return build("llama").double()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.6, 0.5, parameter.numel()).view_as(parameter).roll(number, 0))
    return model


def batch_of(plugin: str, step: int) -> Any:
    """Return the batch of a step, over all ranks."""
    return {"input_ids": _IDS[step % 2], "labels": _IDS[step % 2]} if plugin in DIVIDING else BATCHES[step]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a model of `net`."""
    return model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()
