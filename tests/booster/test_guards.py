"""What would train on silently wrong is refused: other batches, torch's clipping, losses and gradients that are NaN."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from colossal import nn as cnn
from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16TorchMixedPrecision
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import ConfigError, NonFiniteError, UnsupportedError
from colossal.testing import run_threads

FP32: dict[str, Callable[[], Plugin | None]] = {
    "none": lambda: None,
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": lambda: LowLevelZeroPlugin(precision="fp32"),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "Gemini": lambda: GeminiPlugin(precision="fp32"),
    "Hybrid": lambda: HybridParallelPlugin(1, 1, precision="fp32"),
    "Hybrid with ZeRO-1": lambda: HybridParallelPlugin(1, 1, precision="fp32", zero_stage=1),
}
SHARDED = ("ZeRO-1", "ZeRO-2", "Gemini", "Hybrid with ZeRO-1")


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def boosted(plugin: Plugin | None, net: nn.Module | None = None, **options: Any) -> tuple[Booster, Any, Any]:
    net = net or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():  # ranks that are threads draw from one generator
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    booster = Booster(device="cpu", plugin=plugin, **options)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return booster, model, optimizer


# ----------------------------------------------------------------------------------------------- torch's clipping


def clip_by_torch(way: str) -> list[str]:
    booster, model, optimizer = boosted(FP32[way]())
    booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
    found = []
    for clip in (
        lambda: clip_grad_norm_(model.parameters(), 0.1),
        lambda: clip_grad_value_(model.parameters(), 0.1),
    ):
        try:
            clip()
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("way", SHARDED)
def test_torch_does_not_clip_gradients_that_are_elsewhere(way: str) -> None:
    for by_norm, by_value in run_threads(clip_by_torch, 2, way):
        assert "Call optimizer.clip_grad_by_norm(max_norm)" in by_norm
        assert by_norm == by_value


@pytest.mark.parametrize("way", ["none", "DDP", "FSDP", "Hybrid"])
def test_torch_clips_gradients_that_are_there(way: str) -> None:
    assert run_threads(clip_by_torch, 2, way) == [["", ""]] * 2


def clip_scaled_by_torch(way: str) -> list[float]:
    precision = FP16TorchMixedPrecision(init_scale=1024.0, growth_interval=2)
    booster, model, optimizer = boosted(FP32[way](), mixed_precision=precision)
    norms, moved = [], []
    for step in range(5):
        before = [full(each.detach()).clone() for each in model.parameters()]
        with booster.no_sync(model, optimizer) if step == 2 and way != "none" else nullcontext():
            booster.backward(0.0 * model(torch.ones(3, 4)).sum(), optimizer)
        booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
        if step == 3:
            next(iter(model.parameters())).grad.mul_(torch.inf)
        if step == 1:
            clip_grad_value_(list(model.parameters())[:1], 0.01)
            assert [full(each.grad).abs().max() > 0.01 for each in model.parameters()] == [False, True, True, True]
        norm = full(clip_grad_norm_(model.parameters(), 0.05))
        norms.append(norm.item())
        with pytest.raises(ConfigError, match="must come before the gradients are unscaled"):
            booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        after = [full(each.detach()) for each in model.parameters()]
        moved.append(float(get_total_norm([new - old for new, old in zip(after, before, strict=True)])))
    parameter = next(iter(model.parameters()))
    assert type(deepcopy(parameter)) in (nn.Parameter, DTensor)
    if way != "FSDP":  # no file can have a mesh of ranks that are threads
        torch.save(parameter, file := BytesIO())
        file.seek(0)
        assert type(torch.load(file)) is nn.Parameter
    assert norms[3] == torch.inf
    assert min(norms) > 0.05
    assert max(norms[:3] + norms[4:]) < 50  # those of the loss, not of 1024 times the loss
    return moved


@pytest.mark.parametrize("way", ["none", "DDP", "FSDP"])
def test_torch_clips_scaled_gradients_as_unscaled_ones(way: str) -> None:
    for moved in run_threads(clip_scaled_by_torch, 2, way):
        # the learning rate times the norm; an overflow skips the step
        assert moved == pytest.approx([0.005, 0.005, 0.005, 0.0, 0.005], rel=1e-4)


def clip_tensor_parallel() -> str:
    with ParallelMesh(tp=2):
        booster, model, optimizer = boosted(None, nn.Sequential(cnn.Linear(4, 4), nn.LayerNorm(4)))
        booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
        with pytest.raises(ConfigError, match="the gradients of each rank by a different norm"):
            clip_grad_norm_(model.parameters(), 0.1)
        assert len(list(model.parameters())) == len(dict(model.named_parameters())) == 4  # others may ask
        optimizer.clip_grad_by_norm(0.1)
        return f"{optimizer.get_grad_norm():.4f}"


def test_torch_does_not_clip_by_the_norm_of_one_rank() -> None:
    assert run_threads(clip_tensor_parallel, 2) == ["0.1000"] * 2


# ----------------------------------------------------------------------------------------------- the Booster's clipping


def norms(way: str) -> list[float]:
    booster, model, optimizer = boosted(FP32[way](), max_norm=0.05)
    before = [p.detach().clone() for p in optimizer.parameters]
    booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
    optimizer.step()
    after = [p.detach() for p in optimizer.parameters]
    local = [getattr(a - b, "_local_tensor", a - b) for a, b in zip(after, before, strict=True)]
    return [float(sum(each.square().sum() for each in local))]


@pytest.mark.parametrize("way", FP32)
def test_every_plugin_clips_to_the_norm_of_the_booster(way: str) -> None:
    found = [each[0] for each in run_threads(norms, 2, way)]
    total = sum(found) if way in (*SHARDED, "FSDP") else found[0]
    assert total**0.5 == pytest.approx(0.1 * 0.05, rel=1e-4)


def test_two_norms_contradict_each_other() -> None:
    def program() -> None:
        with pytest.raises(
            ConfigError, match=r"clipped to one norm. Found max_norm=1.0 .* next to 0.5 .* of the plugin"
        ):
            boosted(LowLevelZeroPlugin(precision="fp32", max_norm=0.5), max_norm=1.0)

    run_threads(program, 2)


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), (1.0, 0.0)])
def test_a_norm_that_is_none_is_refused(max_norm: float, norm_type: float) -> None:
    with pytest.raises(ConfigError, match="The defaults are 0.0 and 2.0"):
        Booster(device="cpu", max_norm=max_norm, norm_type=norm_type)


# ----------------------------------------------------------------------------------------------- infinite and NaN


def nonfinite(way: str, culprit: int, where: str) -> str:
    booster, model, optimizer = boosted(FP32[way](), refuse_nonfinite=True)
    rank = torch.distributed.get_rank()
    for step in range(3):
        loss = model(torch.ones(3, 4)).square().sum()
        broken = step == 1 and rank == culprit
        if broken and where == "loss":
            loss = loss * float("nan")
        booster.backward(loss, optimizer)
        if broken and where == "gradient":
            optimizer.unscale_grad()
            grad = next(p.grad for p in optimizer.parameters if p.grad is not None and p.grad.numel())
            getattr(grad, "_local_tensor", grad).view(-1)[0] = float("inf")
        before = [p.detach().clone() for p in optimizer.parameters]
        try:
            optimizer.step()
        except NonFiniteError as error:
            assert step == 1
            assert all(torch.equal(p, q) for p, q in zip(optimizer.parameters, before, strict=True))
            return str(error)
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("way", [each for each in FP32 if each != "none"])
def test_a_nonfinite_number_on_one_rank_is_an_error_on_all(way: str, where: str) -> None:
    first, second = run_threads(nonfinite, 2, way, 1, where)
    assert first == second
    assert first.startswith("A step needs a finite loss and finite gradients. Found in step 1 on rank")
    if where == "loss":
        assert "on rank 1: the loss" in first
        if way != "none":  # and the gradients of all ranks, as these are averaged
            assert "on rank 0: the gradient of 0.weight" in first
    else:
        assert "on rank 1: the gradient of 0." in first or "on rank 1: the gradient of 2." in first


def test_a_loss_counts_whose_gradients_are_finite() -> None:
    booster, model, optimizer = boosted(None, refuse_nonfinite=True)
    booster.backward(model(torch.ones(3, 4)).sum() + float("inf"), optimizer)
    with pytest.raises(NonFiniteError, match=r"Found in step 0 on rank 0: the loss\. Nothing was updated"):
        optimizer.step()


def test_without_the_option_nothing_is_refused() -> None:
    def program() -> None:
        booster, model, optimizer = boosted(TorchDDPPlugin())
        booster.backward(model(torch.ones(3, 4)).sum() * float("nan"), optimizer)
        optimizer.step()

    run_threads(program, 2)


def test_large_gradients_are_finite() -> None:
    booster, _, optimizer = boosted(None, net := nn.Linear(2, 2), refuse_nonfinite=True)
    booster.backward((net.weight * 3e38).sum(), optimizer)  # whose squares are not
    optimizer.step()


def test_what_can_not_be_checked_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected: the step is skipped"):
        boosted(None, mixed_precision="fp16", refuse_nonfinite=True)
    _, _, optimizer = boosted(None, refuse_nonfinite=True)
    with pytest.raises(UnsupportedError, match="Found a closure"):
        optimizer.step(lambda: 0.0)


# ----------------------------------------------------------------------------------------------- batches


def other_batch(number: int, check_batches: int | None) -> list[str]:
    """Ranks of tp see another batch from a step on."""
    with ParallelMesh(tp=2) as mesh:
        booster, model, optimizer = boosted(None, nn.Sequential(cnn.Linear(4, 4)), check_batches=check_batches)
        found = []
        for step in range(4):
            batch = torch.full((3, 4), float(mesh.rank("tp") if step >= number else 7))
            try:
                booster.backward(model(batch).square().sum(), optimizer)
            except ConfigError as error:
                return [*found, str(error)]
            optimizer.step()
            optimizer.zero_grad()
            found.append("")
    return found


@pytest.mark.parametrize(("number", "check_batches", "trained"), [(0, 2, 0), (1, 2, 1), (3, None, 3)])
def test_another_batch_on_a_rank_of_tp_is_an_error(number: int, check_batches: int | None, trained: int) -> None:
    for found in run_threads(other_batch, 2, number, check_batches):
        assert len(found) == trained + 1
        assert f"a different batch {trained} on rank 1 than on rank 0" in found[-1]


@pytest.mark.parametrize(("number", "check_batches"), [(2, 2), (0, 0)])
def test_batches_are_compared_as_often_as_the_user_says(number: int, check_batches: int) -> None:
    assert run_threads(other_batch, 2, number, check_batches) == [[""] * 4] * 2


def other_batch_on_a_stage() -> str:
    booster, model, optimizer = boosted(HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32"))
    rank = torch.distributed.get_rank()
    batch = torch.full((4, 4), float(rank)), torch.zeros(4, 2)
    try:
        booster.execute_pipeline(iter([batch]), model, lambda out, batch: (out - batch[1]).square().mean(), optimizer)
    except ConfigError as error:
        return str(error)
    return ""


def test_another_batch_on_a_stage_is_an_error() -> None:
    for found in run_threads(other_batch_on_a_stage, 2):
        assert "a different batch 0 on rank 1 than on rank 0" in found


def no_batch_on_a_stage() -> str:
    booster, model, optimizer = boosted(HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32"))
    batches: Iterator[Any] = iter([(torch.ones(4, 4), torch.zeros(4, 2))] * (1 - torch.distributed.get_rank()))
    try:
        booster.execute_pipeline(batches, model, lambda out, batch: (out - batch[1]).square().mean(), optimizer)
    except ConfigError as error:
        return str(error)
    return ""


def test_no_batch_on_a_stage_is_an_error_there_too() -> None:
    for found in run_threads(no_batch_on_a_stage, 2):
        assert "a different batch 0 on rank 1" in found


def test_data_parallel_ranks_see_other_batches_and_checks_are_not_counted() -> None:
    def program() -> int:
        with ParallelMesh(tp=2, dp=2) as mesh:
            booster, model, optimizer = boosted(TorchDDPPlugin(), nn.Sequential(cnn.Linear(4, 4, bias=False)))
            with CommCounter() as counter:
                booster.backward(model(torch.full((3, 4), float(mesh.rank("dp")))).square().sum(), optimizer)
            return counter.bytes["all_reduce", "dp"]

    assert run_threads(program, 4) == [4 * 4 * 4 // 2] * 4  # of the half of the weight that a rank has
