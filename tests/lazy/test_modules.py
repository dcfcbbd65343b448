# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""The modules of torch, each lazily and at once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(5, 7),
    "Linear of float64": lambda: nn.Linear(5, 7, dtype=torch.float64),
    "Linear of bfloat16": lambda: nn.Linear(50, 7, dtype=torch.bfloat16),
    "Bilinear": lambda: nn.Bilinear(3, 4, 5),
    "Conv1d": lambda: nn.Conv1d(3, 5, 3),
    "Conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "Conv2d in channels last": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    "Conv3d": lambda: nn.Conv3d(2, 3, 2, padding_mode="circular"),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(3, 5, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(3, 5, 3),
    "ConvTranspose3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "BatchNorm2d without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm((3, 4)),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "Embedding": lambda: nn.Embedding(11, 7, padding_idx=2),
    "EmbeddingBag": lambda: nn.EmbeddingBag(11, 7, mode="sum", padding_idx=-1),
    "Embedding of given values": lambda: nn.Embedding.from_pretrained(torch.arange(6.0).reshape(2, 3)),
    "RNN": lambda: nn.RNN(3, 4, 2),
    "GRU": lambda: nn.GRU(3, 4, bidirectional=True),
    "LSTM": lambda: nn.LSTM(3, 4, 2, proj_size=2),
    "LSTMCell": lambda: nn.LSTMCell(3, 4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    "Transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "PReLU": lambda: nn.PReLU(3),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 20, [4, 10]),
    "CrossEntropyLoss": lambda: nn.CrossEntropyLoss(weight=torch.arange(3.0)),
    "ParameterList": lambda: nn.ParameterList([nn.Parameter(torch.randn(each)) for each in (3, 20)]),
    "ParameterDict": lambda: nn.ParameterDict({"a": torch.rand(3), "b": nn.Parameter(torch.ones(2))}),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 4)),
    "half": lambda: nn.Sequential(nn.Linear(20, 5), nn.BatchNorm1d(5)).half(),
    "to a dtype": lambda: nn.Linear(20, 5).to(torch.bfloat16).double(),
    "double, frozen": lambda: nn.Linear(20, 5).double().requires_grad_(requires_grad=False),
    "deepcopy inside, with values": lambda: nn.ModuleList([copy.deepcopy(nn.BatchNorm1d(4)) for _ in range(2)]),
    "deepcopy inside": lambda: nn.ModuleList([copy.deepcopy(nn.Linear(4, 4)) for _ in range(2)]),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_built_lazily_as_at_once(name: str, same_modules: Callable[..., Any]) -> None:
    same_modules(MODULES[name])


def test_a_recurrent_module_runs_after_it_was_built_lazily(same_modules: Callable[..., Any]) -> None:
    eager, lazy = same_modules(lambda: nn.LSTM(3, 4, 2))
    sequence = torch.arange(12.0).reshape(2, 2, 3)
    assert torch.equal(eager(sequence)[0], lazy(sequence)[0])


def test_a_parametrized_module_trains_after_it_was_built_lazily(same_modules: Callable[..., Any]) -> None:
    pair = same_modules(MODULES["spectral_norm"])
    for each in pair:
        each(torch.ones(2, 3)).sum().backward()
    gradients = [[parameter.grad for parameter in each.parameters()] for each in pair]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_ties_and_shared_modules(same_modules: Callable[..., Any]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embedding.weight
            self.once = self.again = nn.Linear(2, 2)
            self.register_buffer("kept", torch.arange(3))
            self.register_buffer("derived", self.kept * 2, persistent=False)

    _, lazy = same_modules(Tied)
    assert lazy.head.weight is lazy.embedding.weight
    assert lazy.once.weight is lazy.again.weight


def test_a_module_under_default_types(same_modules: Callable[..., Any]) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        same_modules(lambda: nn.Linear(20, 3))
    finally:
        torch.set_default_dtype(before)
