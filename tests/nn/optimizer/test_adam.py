# pyright: reportArgumentType=false, reportCallIssue=false
"""What CPUAdam, HybridAdam and FusedAdam have beyond the algorithm: torch's states, copies, scales, layouts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from colossal.errors import ConfigError, ShapeError
from colossal.nn.optimizer import CPUAdam, FusedAdam, HybridAdam

KINDS = (CPUAdam, HybridAdam, FusedAdam)
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 6)).to(dtype)


def take(optimizer: torch.optim.Optimizer, model: nn.Module, seeds: range, scale: float = 1.0, **kwargs: Any) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)
        optimizer.step(**kwargs)


def assert_same(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adamw", [True, False])
def test_a_state_goes_to_torch_and_back(kind, adamw) -> None:
    """Two runs swap their optimizers in the middle, and neither notices."""
    theirs = torch.optim.AdamW if adamw else torch.optim.Adam
    build: tuple[Callable, Callable] = (
        lambda model: kind(model.parameters(), adamw_mode=adamw, **OPTIONS),
        lambda model: theirs(model.parameters(), **OPTIONS),
    )
    mine, its = model_of(), model_of()
    firsts = build[0](mine), build[1](its)
    take(firsts[0], mine, range(2))
    take(firsts[1], its, range(2))
    seconds = build[1](mine), build[0](its)
    for old, new in zip(firsts, seconds, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert {key: value.dtype for key, value in firsts[0].state[mine[0].weight].items()} == {
        key: value.dtype for key, value in firsts[1].state[its[0].weight].items()
    }
    take(seconds[0], mine, range(2, 5))
    take(seconds[1], its, range(2, 5))
    assert_same(mine, its)
    through = model_of()
    take(build[1](through), through, range(5))
    assert_same(mine, through)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_is_divided_out_in_the_step(kind) -> None:
    options = OPTIONS | {"eps": 0.5}  # without it, the scale of gradients would not matter
    plain, scaled = model_of(), model_of()
    take(kind(plain.parameters(), **options), plain, range(3))
    take(kind(scaled.parameters(), **options), scaled, range(3), scale=1024.0, div_scale=1024.0)
    assert_same(plain, scaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_are_the_new_values_rounded(dtype, low) -> None:
    model = model_of(dtype)
    optimizer = CPUAdam(model.parameters(), **OPTIONS)
    conv, linear = model[0].weight, model[1].weight
    copies = {conv: torch.zeros(conv.numel(), dtype=low), linear: torch.zeros(linear.shape, dtype=low)}
    optimizer.set_param_copies(copies)
    versions = {param: param._version for param in model.parameters()} | {
        copied: copied._version for copied in copies.values()
    }
    take(optimizer, model, range(2))
    for param, copied in copies.items():
        torch.testing.assert_close(copied.flatten(), param.detach().to(low).flatten(), rtol=0, atol=0)
    assert all(tensor._version > version for tensor, version in versions.items())
    optimizer.set_param_copies({})
    take(optimizer, model, range(2, 3))
    assert not torch.equal(copies[conv], conv.detach().to(low).flatten())


def test_copies_that_do_not_fit_are_refused() -> None:
    model = model_of()
    optimizer = HybridAdam(model.parameters())
    weight = model[1].weight
    for wrong in (torch.zeros(3), torch.zeros(30, dtype=torch.int32), torch.zeros(60)[::2], weight.to("meta")):
        with pytest.raises(ShapeError, match="The copy of a parameter is contiguous, of 30 elements"):
            optimizer.set_param_copies({weight: wrong})
    with pytest.raises(ConfigError, match="parameters that the optimizer updates"):
        optimizer.set_param_copies({nn.Parameter(torch.zeros(2)): torch.zeros(2)})


def test_parameters_and_gradients_may_lie_in_any_order() -> None:
    plain, strided = model_of(), model_of().to(memory_format=torch.channels_last)
    assert not strided[0].weight.is_contiguous()
    one, other = CPUAdam(plain.parameters(), **OPTIONS), CPUAdam(strided.parameters(), **OPTIONS)
    take(one, plain, range(2))
    take(other, strided, range(2))
    other.load_state_dict(copy.deepcopy(other.state_dict()))
    for param, same in zip(plain.parameters(), strided.parameters(), strict=True):
        param.grad, same.grad = torch.ones(param.shape[::-1]).permute(*range(param.dim())[::-1]), torch.ones_like(param)
    one.step()
    other.step()
    assert_same(plain, strided)
    assert not strided[0].weight.is_contiguous()


def test_parameters_that_join_later_count_their_own_steps() -> None:
    model, its = model_of(), model_of()
    optimizer, theirs = CPUAdam(model[0].parameters(), **OPTIONS), torch.optim.AdamW(its[0].parameters(), **OPTIONS)
    take(optimizer, model, range(2))
    take(theirs, its, range(2))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    theirs.add_param_group({"params": its[1].parameters(), "lr": 0.01})
    take(optimizer, model, range(2, 4))
    take(theirs, its, range(2, 4))
    model[0].weight.grad = its[0].weight.grad = None
    optimizer.step()
    theirs.step()
    assert_same(model, its)
    assert optimizer.state[model[0].weight]["step"] == 4
    assert optimizer.state[model[0].bias]["step"] == 5
    assert optimizer.state[model[1].bias]["step"] == 3


def test_a_state_that_was_cast_is_widened_again() -> None:
    """Whoever loads as torch does gives the state the dtype of the parameter."""
    model = model_of(torch.bfloat16)
    optimizer = CPUAdam(model.parameters())
    take(optimizer, model, range(1))
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    take(optimizer, model, range(1, 2))
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_the_states_of_a_model_share_pages() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = CPUAdam(model.parameters())
    take(optimizer, model, range(1))
    at = sorted(state[name].data_ptr() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert at[-1] - at[0] < 2 * sum(param.numel() for param in model.parameters()) * 4 + 64 * len(at)


def test_a_closure_and_a_schedule() -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = HybridAdam([weight], lr=0.5, max_lr=7.0)
    scheduler = StepLR(optimizer, 1, gamma=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    scheduler.step()
    assert optimizer.step(closure).item() == 6.25
    assert weight.item() == pytest.approx(2.45, abs=1e-3)
    assert optimizer.param_groups[0]["max_lr"] == 7.0


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_fused_adam_frees_or_clears_gradients(set_grad_none) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([weight], set_grad_none=set_grad_none)
    weight.grad = torch.ones(2)
    optimizer.zero_grad()
    assert weight.grad is None if set_grad_none else not weight.grad.any()
    weight.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=True)
    assert weight.grad is None


def test_nothing_to_update_is_nothing() -> None:
    optimizer = CPUAdam([nn.Parameter(torch.ones(2))])
    optimizer.step()
    assert not optimizer.state


def test_a_learning_rate_may_be_a_tensor() -> None:
    plain, other = model_of(), model_of()
    take(CPUAdam(plain.parameters(), lr=0.25), plain, range(2))
    take(CPUAdam(other.parameters(), lr=torch.tensor(0.25)), other, range(2))
    assert_same(plain, other, 0)


def test_a_share_on_disk_needs_a_folder_and_is_a_share(tmp_path) -> None:
    params = [nn.Parameter(torch.ones(2))]
    for kind in (CPUAdam, HybridAdam):
        with pytest.raises(ConfigError, match="a folder that exists"):
            kind(params, nvme_offload_fraction=0.5, nvme_offload_dir=str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="from 0 to 1"):
            kind(params, nvme_offload_fraction=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_it_equals_the_cpu(dtype) -> None:
    here, there = model_of(dtype), model_of(dtype).cuda()
    ours, its = HybridAdam(here.parameters(), **OPTIONS), HybridAdam(there.parameters(), **OPTIONS)
    for _ in range(3):
        for param, same in zip(here.parameters(), there.parameters(), strict=True):
            param.grad = torch.randn_like(param)
            same.grad = param.grad.cuda()
        ours.step()
        its.step()
    assert_same(here, there.cpu(), torch.finfo(dtype).eps * 2)
