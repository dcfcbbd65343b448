# pyright: reportArgumentType=false
"""Optimizers and schedules go on as if nothing had happened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from colossal._src.amp import DynamicScaler, ScalerConfig
from colossal.checkpoint_io import CheckpointIndexFile, CheckpointIO
from colossal.errors import CheckpointError
from colossal.interface import OptimizerWrapper

IO = CheckpointIO()


def build(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)


def plain(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return [{"params": decayed, "lr": 0.2}, {"params": [p for p in model.parameters() if p.dim() == 1]}]


def named(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.named_parameters())}]


def step(model: nn.Module, optimizer: Any, times: int = 1) -> None:
    for seed in range(times):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(8, 4, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def wrap(model: nn.Module, optimizer: Optimizer, scaler: DynamicScaler | None = None) -> OptimizerWrapper:
    return OptimizerWrapper(optimizer, scaler, {parameter: name for name, parameter in model.named_parameters()})


KINDS = {
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "plain-sgd": lambda groups: SGD(groups, lr=0.1),
    "adamw": lambda groups: AdamW(groups, lr=0.01, amsgrad=True),
    "lbfgs": lambda groups: torch.optim.LBFGS(groups[0]["params"], lr=0.1),
}


def resume(
    folder: Path, model: nn.Module, optimizer: Any, fresh: nn.Module, fresh_optimizer: Any, **saving: Any
) -> None:
    """Save one run, load it into another, and let both take the same steps."""
    IO.save_model(model, folder / "model.pt")
    IO.save_optimizer(optimizer, folder / "optim", **saving)
    IO.load_model(fresh, folder / "model.pt")
    IO.load_optimizer(fresh_optimizer, folder / "optim", "documented prefix", True, 1)
    step(model, optimizer, 2)
    step(fresh, fresh_optimizer, 2)
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["sgd", "plain-sgd", "adamw"])
@pytest.mark.parametrize("groups", [plain, two_groups, named])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("shard", [False, True])
def test_the_next_steps_are_equal(
    tmp_path: Path, kind: str, groups: Callable[[nn.Module], Any], wrapped: bool, shard: bool
) -> None:
    model, fresh = build(), build(1)
    optimizer, fresh_optimizer = KINDS[kind](groups(model)), KINDS[kind](groups(fresh))
    step(model, optimizer, 3)
    if wrapped:
        optimizer, fresh_optimizer = wrap(model, optimizer), wrap(fresh, fresh_optimizer)
    resume(tmp_path, model, optimizer, fresh, fresh_optimizer, shard=shard, size_per_shard=1 / 2**14)
    assert fresh_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_state_in_lists_comes_back(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    fresh = torch.optim.LBFGS([nn.Parameter(torch.ones(3))], lr=0.5)
    IO.save_optimizer(optimizer, tmp_path / "optim")
    IO.load_optimizer(fresh, tmp_path / "optim")
    assert fresh.param_groups[0]["lr"] == 0.1
    assert torch.equal(fresh.state_dict()["state"][0]["old_dirs"][0], optimizer.state_dict()["state"][0]["old_dirs"][0])


@pytest.mark.parametrize("shard", [False, True])
def test_order_does_not_matter_where_names_are_known(tmp_path: Path, shard: bool) -> None:
    model, fresh = build(), build(1)
    groups = two_groups(fresh)[::-1]
    for group in groups:
        group["params"].reverse()
    optimizer = wrap(model, AdamW(two_groups(model)))
    step(model, optimizer, 3)
    fresh_optimizer = wrap(fresh, AdamW(groups))
    resume(tmp_path, model, optimizer, fresh, fresh_optimizer, shard=shard)
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [1e-3, 0.2]


def test_names_of_the_wrapper_and_of_torch_are_the_same_thing(tmp_path: Path) -> None:
    model, fresh = build(), build(1)
    optimizer = SGD(list(model.named_parameters())[::-1], lr=0.1, momentum=0.9)
    step(model, optimizer)
    resume(tmp_path, model, optimizer, fresh, wrap(fresh, SGD(fresh.parameters(), lr=0.5, momentum=0.9)))
    own_names = SGD(list(fresh.named_parameters()), lr=0.1, momentum=0.9)
    IO.load_optimizer(own_names, tmp_path / "optim")
    assert own_names.param_groups[0]["param_names"] == [name for name, _ in fresh.named_parameters()]


def test_names_that_two_parameters_share_are_not_used(tmp_path: Path) -> None:
    model, fresh = build(), build(1)

    def shared(model: nn.Sequential) -> AdamW:
        return AdamW([{"params": list(layer.named_parameters())} for layer in model])

    optimizer = shared(model)
    step(model, optimizer)
    resume(tmp_path, model, optimizer, fresh, shared(fresh))


def test_a_file_of_torch_loads_by_position(tmp_path: Path) -> None:
    model, fresh = build(), build()
    optimizer = AdamW(model.parameters())
    step(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optim")
    fresh_optimizer = wrap(fresh, AdamW(fresh.parameters()))
    IO.load_optimizer(fresh_optimizer, tmp_path / "optim")
    assert torch.equal(fresh_optimizer.state[fresh[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_the_file_holds_names_and_plain_data(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    model = build()
    optimizer = wrap(model, AdamW(model.parameters()))
    step(model, optimizer)
    IO.save_optimizer(optimizer, tmp_path / "optim")
    names = [name for name, _ in model.named_parameters()]
    with safetensors.safe_open(tmp_path / "optim", framework="pt") as file:
        assert set(file.keys()) == {f"{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
        assert torch.equal(file.get_tensor("0.weight/exp_avg"), optimizer.state[model[0].weight]["exp_avg"])
    content = IO.load_plain(tmp_path / "optim")
    assert list(content["state"]) == names
    assert content["param_groups"][0]["params"] == names
    assert content["param_groups"][0]["lr"] == 1e-3
    assert content["param_groups"][0]["betas"] == (0.9, 0.999)
    assert content["scaler"] == {}


@pytest.mark.parametrize("shard", [False, True])
def test_a_checkpoint_in_the_format_of_torch_loads(tmp_path: Path, shard: bool) -> None:
    model, fresh = build(), build(1)
    optimizer = wrap(model, AdamW(two_groups(model)))
    step(model, optimizer, 2)
    IO.save_optimizer(optimizer, tmp_path / "ours")
    content = IO.load_plain(tmp_path / "ours")
    if shard:
        state = content.pop("state")
        torch.save(content, tmp_path / "pytorch_optim_group.bin")
        index = CheckpointIndexFile(tmp_path)
        index.append_meta_data("param_groups", "pytorch_optim_group.bin")
        for number, (name, entry) in enumerate(state.items(), 1):
            file = f"pytorch_optim-{number:05d}-of-{len(state):05d}.bin"
            torch.save({name: entry}, tmp_path / file)
            index.append_weight_map(name, file)
        index.write_index_file("pytorch_optim.bin.index.json")
    else:
        torch.save(content, tmp_path / "theirs")
    fresh_optimizer = wrap(fresh, AdamW(two_groups(fresh)))
    IO.load_optimizer(fresh_optimizer, tmp_path if shard else tmp_path / "theirs")
    for name, parameter in fresh.named_parameters():
        for key, value in optimizer.state[model.get_parameter(name)].items():
            assert torch.equal(fresh_optimizer.state[parameter][key], value), (name, key)


@pytest.mark.parametrize("mapped", [True, False])
def test_dtypes_come_back_and_memory_is_the_optimizers_own(tmp_path: Path, mapped: bool) -> None:
    model, fresh = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16)
    optimizer, fresh_optimizer = AdamW(model.parameters()), AdamW(fresh.parameters())
    step(model, optimizer)
    IO.save_optimizer(optimizer, tmp_path / "optim")
    IO.load_optimizer(fresh_optimizer, tmp_path / "optim", low_cpu_mem_mode=mapped)
    state = fresh_optimizer.state[fresh[0].weight]
    assert (state["step"].dtype, state["exp_avg"].dtype) == (torch.float32, torch.bfloat16)
    (tmp_path / "optim").write_bytes(bytes((tmp_path / "optim").stat().st_size))
    assert torch.equal(state["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


@pytest.mark.parametrize("shard", [False, True])
def test_the_loss_scaler_comes_back(tmp_path: Path, shard: bool) -> None:
    def boosted(init_scale: float) -> OptimizerWrapper:
        model = build()
        return wrap(model, SGD(model.parameters()), DynamicScaler(ScalerConfig(init_scale=init_scale), "cpu"))

    optimizer, fresh = boosted(8.0), boosted(2.0)
    optimizer.scale_loss(torch.ones(()))
    fresh.scale_loss(torch.ones(()))
    IO.save_optimizer(optimizer, tmp_path / "optim", shard=shard)
    IO.load_optimizer(fresh, tmp_path / "optim")
    assert fresh.scaler.scale_value == 8.0


def test_a_sharded_optimizer_has_the_documented_files(tmp_path: Path) -> None:
    model = build()
    optimizer = wrap(model, AdamW(model.parameters()))
    step(model, optimizer)
    for size in (1 / 2**14, 1):
        IO.save_optimizer(optimizer, tmp_path, shard=True, size_per_shard=size, prefix="run")
    IO.save_model(model, tmp_path, shard=True)
    assert {path.name for path in tmp_path.iterdir() if "optim" in path.name} == {
        "run.pytorch_optim-00001-of-00001.1.safetensors",
        "run.pytorch_optim_group.1.safetensors",
        "run.pytorch_optim.safetensors.index.json",
    }
    index = CheckpointIndexFile.from_file(tmp_path / "run.pytorch_optim.safetensors.index.json")
    assert index.get_param_group_filename() == str(tmp_path / "run.pytorch_optim_group.1.safetensors")
    assert index.metadata["total_size"] == sum(8 * p.numel() + 4 for p in model.parameters())
    IO.load_optimizer(optimizer, tmp_path, num_threads=2)


def test_another_optimizer_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = build()
    IO.save_optimizer(wrap(model, SGD(model.parameters(), lr=0.5)), tmp_path / "optim")
    wider, other = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(4), nn.Linear(4, 2)), nn.Linear(2, 2)
    cases = {
        r"0\.weight \(file \[4, 4\], model \[5, 4\]\)": wrap(wider, SGD(wider.parameters())),
        "not in the file at all: weight, bias": wrap(other, SGD(other.parameters())),
        "2 parameter groups": wrap(model, SGD(two_groups(model))),
        r"not in the file at all: .*only in the file: .*2\.bias": SGD(model.parameters()),
    }
    for message, optimizer in cases.items():
        before = optimizer.param_groups[0]["lr"]
        with pytest.raises(CheckpointError, match=message):
            IO.load_optimizer(optimizer, tmp_path / "optim")
        assert optimizer.param_groups[0]["lr"] == before != 0.5


def test_other_files_are_refused(tmp_path: Path) -> None:
    model = build()
    optimizer = SGD(model.parameters())
    IO.save_model(model, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="loaded by load_model"):
        IO.load_optimizer(optimizer, tmp_path / "model.pt")
    IO.save_model(model, tmp_path / "model", shard=True)
    with pytest.raises(CheckpointError, match=r"pytorch_optim\.safetensors\.index\.json"):
        IO.load_optimizer(optimizer, tmp_path / "model")
    with pytest.raises(CheckpointError, match="name its file of groups"):
        IO.load_optimizer(optimizer, tmp_path / "model" / "pytorch_model.bin.index.json")
    IO.save_optimizer(optimizer, tmp_path / "optim", shard=True)
    (tmp_path / "optim" / "pytorch_optim_group.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_optim_group\.safetensors"):
        IO.load_optimizer(optimizer, tmp_path / "optim")


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, 10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on(tmp_path: Path, kind: str) -> None:
    optimizers = [SGD(build().parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    schedule, fresh = (SCHEDULES[kind](optimizer) for optimizer in optimizers)
    for _ in range(3):
        optimizers[0].step()
        schedule.step()
    IO.save_lr_scheduler(schedule, tmp_path / "new" / "schedule")
    IO.save_optimizer(optimizers[0], tmp_path / "optim")
    IO.load_lr_scheduler(fresh, tmp_path / "new" / "schedule")
    IO.load_optimizer(optimizers[1], tmp_path / "optim")
    for each, optimizer in zip((schedule, fresh), optimizers, strict=True):
        optimizer.step()
        each.step()
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


class Decay:
    def __init__(self) -> None:
        self.rule = lambda epoch: 0.9**epoch

    def __call__(self, epoch: int) -> float:
        return self.rule(epoch)


def test_a_schedule_that_is_not_plain_data_is_refused(tmp_path: Path) -> None:
    schedule = lr_scheduler.LambdaLR(SGD(build().parameters(), lr=0.1), Decay())
    with pytest.raises(CheckpointError, match="Keep functions and objects out of the state"):
        IO.save_lr_scheduler(schedule, tmp_path / "schedule")
    assert not list(tmp_path.iterdir())


def test_the_file_of_another_schedule_is_refused(tmp_path: Path) -> None:
    optimizer = SGD(build().parameters(), lr=0.1)
    IO.save_lr_scheduler(lr_scheduler.ExponentialLR(optimizer, 0.9), tmp_path / "schedule")
    with pytest.raises(CheckpointError, match="file of a StepLR.*without step_size"):
        IO.load_lr_scheduler(lr_scheduler.StepLR(optimizer, 2), tmp_path / "schedule")
    with pytest.raises(CheckpointError, match="missing"):
        IO.load_lr_scheduler(lr_scheduler.StepLR(optimizer, 2), tmp_path / "missing")
