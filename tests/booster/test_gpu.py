# pyright: reportArgumentType=false
"""The Booster on a GPU. Skipped where there is none; nothing is called verified there that did not run there."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

import colossal
from colossal._src.amp import FP8Linear, fp8_linear
from colossal.booster import Booster
from colossal.booster.plugin import Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colossal.testing import assert_close, run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def losses_of(booster: Booster | None, device: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    if booster is not None:
        model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)
    inputs = torch.linspace(-1, 1, 8 * 16, device=device).view(8, 16)
    targets = torch.arange(8, device=device) % 4
    losses = []
    for _ in range(5):
        loss = criterion(model(inputs), targets)
        loss.backward() if booster is None else booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses)


def train_on_a_gpu(plugin: Plugin, precision: str | None) -> str:
    torch.backends.cuda.matmul.allow_tf32 = False
    colossal.launch_from_torch(verbose=False)
    losses = losses_of(Booster(plugin=plugin, mixed_precision=precision), "cuda")
    expected = losses_of(None, "cuda")
    if precision is None:
        assert_close(losses, expected)
    else:
        error = 0.06 if precision == "fp8" else 0.02
        torch.testing.assert_close(losses, expected, rtol=error, atol=error)
    return dist.get_backend()


CASES = [
    (plugin, precision)
    for plugin in (TorchDDPPlugin(), TorchFSDPPlugin())
    for precision in (None, *plugin.supported_precisions)
    if precision != "fp16_apex"
]


@pytest.mark.parametrize(("plugin", "precision"), CASES)
def test_a_gpu_trains_like_plain_torch_over_nccl(plugin, precision) -> None:
    environment = {"COLOSSAL_DEVICE": "cuda"}
    assert run_processes(train_on_a_gpu, 1, plugin, precision, form=False, environment=environment) == ["nccl"]


def test_parameters_that_are_offloaded_train_alike() -> None:
    plugin = TorchFSDPPlugin(cpu_offload=True)
    environment = {"COLOSSAL_DEVICE": "cuda"}
    assert run_processes(train_on_a_gpu, 1, plugin, None, form=False, environment=environment) == ["nccl"]


@pytest.mark.parametrize("rows", [5, 16, 200])
def test_float8_units_compute_what_their_emulation_computes(rows, monkeypatch) -> None:
    if not fp8_linear.has_float8(torch.device("cuda")):
        pytest.skip("needs a GPU of compute capability 8.9 or above")
    torch.manual_seed(0)
    linear = FP8Linear(64, 32).cuda()
    inputs = torch.randn(rows, 64, device="cuda", requires_grad=True)
    results = []
    for units in (True, False):
        monkeypatch.setattr(fp8_linear, "has_float8", lambda _, units=units: units)
        with torch.autocast("cuda", torch.bfloat16):
            output = linear(inputs)
        output.backward(torch.linspace(-1, 1, rows * 32, device="cuda").view(rows, 32).bfloat16())
        results.append((output.detach(), inputs.grad, linear.weight.grad, linear.bias.grad))
        inputs.grad = linear.weight.grad = linear.bias.grad = None
    for own, emulated in zip(*results, strict=True):
        torch.testing.assert_close(own, emulated, rtol=2**-7, atol=2**-7)
