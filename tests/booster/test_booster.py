# pyright: reportArgumentType=false, reportReturnType=false, reportCallIssue=false
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal._src.interface.boost_types import Parts
from colossal.booster import Booster
from colossal.booster.mixed_precision import BF16MixedPrecision, MixedPrecision, mixed_precision_factory
from colossal.booster.plugin import Plugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import CheckpointError, ConfigError, MeshError, UnsupportedError
from colossal.interface import ModelWrapper, OptimizerWrapper
from colossal.nn.optimizer import CombinedOptimizer, HybridAdam
from colossal.testing import fake_world, run_processes


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def one_step(booster: Booster, model: nn.Module, optimizer: OptimizerWrapper, rows: int = 6) -> torch.Tensor:
    inputs = torch.linspace(-1, 1, 4 * rows).view(rows, 4)
    loss = (model(inputs) ** 2).mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_boost_returns_five_values_whatever_is_given() -> None:
    booster, (model, optimizer) = Booster(device="cpu"), parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    five = booster.boost(model, optimizer, nn.MSELoss(), "a loader", schedule)
    assert isinstance(five[0], ModelWrapper)
    assert isinstance(five[1], OptimizerWrapper)
    assert five[3:] == ("a loader", schedule)
    assert five[0].unwrap() is model
    assert five[1].unwrap() is optimizer
    alone = Booster(device="cpu").boost(nn.Linear(1, 1))
    assert len(alone) == 5
    assert alone[1:] == (None, None, None, None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "tpu"}, ConfigError, "Found 'tpu'"),
        ({"mixed_precision": "fp64"}, ConfigError, "one of fp16, fp16_apex, fp16_naive, bf16, fp8, fp32. Found 'fp64'"),
        ({"plugin": TorchDDPPlugin}, ConfigError, r"Pass for example TorchDDPPlugin\(\)"),
        ({"plugin": "ddp"}, ConfigError, "Found 'ddp'"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        Booster(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="Found 'cuda' with torch"):
        Booster(device="cuda")


class Fixed(MixedPrecision):
    name = "fixed"

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> Any:
        return ModelWrapper(model), optimizer, criterion


def test_a_precision_that_the_plugin_does_not_know_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="TorchDDPPlugin takes mixed_precision 'fp16' or .* or 'fp32'. Found .*'fixed'"
    ):
        Booster(mixed_precision=Fixed(), plugin=TorchDDPPlugin())


def test_a_precision_by_name_equals_the_object() -> None:
    assert isinstance(mixed_precision_factory("bf16"), BF16MixedPrecision)
    assert isinstance(Booster(device="cpu", mixed_precision="bf16").mixed_precision, BF16MixedPrecision)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    booster, (model, optimizer) = Booster(device="cpu"), parts()
    other, other_optimizer = parts()
    with pytest.raises(ConfigError, match="Found 6 that the model does not have"):
        booster.boost(model, other_optimizer)
    with pytest.raises(ConfigError, match="Found one that drives another"):
        booster.boost(model, optimizer, lr_scheduler=torch.optim.lr_scheduler.StepLR(other_optimizer, 1))
    schedule, loader = torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader(TensorDataset(torch.ones(2)))
    with pytest.raises(ConfigError, match=r"Found a DataLoader as criterion\. Pass it by keyword: dataloader="):
        booster.boost(model, optimizer, loader, schedule)
    with pytest.raises(ConfigError, match=r"Found a StepLR as dataloader\. Pass it by keyword: lr_scheduler="):
        booster.boost(model, optimizer, None, schedule)
    wrapped, optim, *_ = booster.boost(other, other_optimizer)
    with pytest.raises(ConfigError, match="Found one that is boosted already"):
        booster.boost(wrapped)
    with pytest.raises(ConfigError, match="boosted already"):
        booster.boost(model, optim)
    with pytest.raises(ConfigError, match="needs the optimizer that boost returned. Found AdamW"):
        booster.backward(torch.ones(()), optimizer)


def test_modules_that_no_plugin_can_look_into_are_refused() -> None:
    booster = Booster(device="cpu")
    with pytest.raises(ConfigError, match="Found 1.weight, of a lazy module.* Run a forward pass of the model before"):
        booster.boost(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
    with pytest.raises(UnsupportedError, match="Boost the model that was scripted or traced"):
        booster.boost(torch.jit.ScriptModule())


def test_a_loader_without_batches() -> None:
    booster, (model, optimizer) = Booster(device="cpu"), parts()
    model, optimizer, *_ = booster.boost(model, optimizer)
    with pytest.raises(StopIteration):
        booster.execute_pipeline(iter([]), model, lambda outputs, _: outputs, optimizer)


def test_no_sync_finds_its_model() -> None:
    booster = Booster(device="cpu")
    with pytest.raises(ConfigError, match="Found 0 that fit among 0"):
        booster.no_sync()
    model, optimizer, *_ = booster.boost(*parts())
    with booster.no_sync(), booster.no_sync(model), booster.no_sync(optimizer=optimizer):
        pass
    second, *_ = booster.boost(*parts())
    with pytest.raises(ConfigError, match="Found 2 that fit among 2"):
        booster.no_sync()
    with pytest.raises(ConfigError, match="Found 0 that fit among 2"):
        booster.no_sync(model.unwrap())
    with pytest.raises(ConfigError, match="Found 0 that fit among 2"):
        booster.no_sync(second, optimizer)


def boost_and_forget() -> int:
    booster, forgotten = Booster(plugin=TorchDDPPlugin()), []
    for _ in range(3):
        model, optimizer, *_ = booster.boost(*parts())
        one_step(booster, model, optimizer)
        forgotten.append(weakref.ref(model.unwrap()))
    with booster.no_sync(model):
        del model, optimizer
    gc.collect()
    return sum(reference() is not None for reference in forgotten)


def test_a_booster_does_not_keep_models_alive() -> None:
    assert run_processes(boost_and_forget, 2) == [0, 0]


def test_a_model_for_another_device_than_the_worlds_is_refused() -> None:
    with fake_world(2), pytest.raises(ConfigError, match="launched for, 'cpu'. Found a model for 'meta'"):
        TorchDDPPlugin().configure(Parts(nn.Linear(1, 1)), torch.device("meta"), None)


def test_ddp_needs_a_world_and_good_arguments() -> None:
    with pytest.raises(MeshError, match="launch_from_torch"):
        Booster(plugin=TorchDDPPlugin()).boost(*parts())
    with pytest.raises(ConfigError, match="Found bucket_cap_mb=0"):
        TorchDDPPlugin(bucket_cap_mb=0)
    assert issubclass(TorchDDPPlugin, Plugin)


def boost_with_every_keyword() -> tuple[str, bool]:
    plugin = TorchDDPPlugin(
        broadcast_buffers=False,
        bucket_cap_mb=1,
        find_unused_parameters=True,
        check_reduction=False,
        gradient_as_bucket_view=True,
        static_graph=False,
        fp8_communication=False,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(*parts())
    one_step(booster, model, optimizer, rows=4 + 2 * dist.get_rank())
    ddp = model.module
    mean = model.unwrap()[1].running_mean
    means = [torch.empty_like(mean) for _ in range(2)]
    dist.all_gather(means, mean)
    return type(ddp).__name__, not torch.equal(*means) and ddp.gradient_as_bucket_view and ddp.find_unused_parameters


def test_ddp_receives_its_keywords() -> None:
    assert run_processes(boost_with_every_keyword, 2) == [("DistributedDataParallel", True)] * 2


def frozen_model() -> list[str]:
    model, *_ = Booster(plugin=TorchDDPPlugin()).boost(nn.Linear(2, 1).requires_grad_(requires_grad=False))
    model(torch.ones(1, 2))
    return [type(module).__name__ for module in model.modules()]


def test_a_model_without_gradients_needs_no_reduction() -> None:
    assert run_processes(frozen_model, 2) == [["ModelWrapper", "ModelWrapper", "Linear"]] * 2


def gradients_inside_and_outside_of_no_sync() -> list[bool]:
    booster = Booster(plugin=TorchDDPPlugin())
    linear = nn.Linear(2, 1)
    model, optimizer, *_ = booster.boost(linear, torch.optim.SGD(linear.parameters()))
    own = torch.full((3, 2), 1.0 + dist.get_rank())
    equal = []
    for context in (booster.no_sync(model), booster.no_sync(optimizer=optimizer), None):
        if context is None:
            booster.backward(model(own).sum(), optimizer)
        else:
            with context:
                booster.backward(model(own).sum(), optimizer)
        grads = [torch.empty(1, 2) for _ in range(2)]
        dist.all_gather(grads, model.unwrap().weight.grad)
        equal.append(torch.equal(*grads))
    expected = 3 * 3 * (1.0 + 2.0) / 2
    assert torch.equal(model.unwrap().weight.grad, torch.full((1, 2), expected))
    return equal


def test_gradients_stay_apart_inside_no_sync_and_agree_after_it() -> None:
    assert run_processes(gradients_inside_and_outside_of_no_sync, 2) == [[False, False, True]] * 2


class PreTrained(nn.Linear):
    """Counts how often it is called under autocast."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name that nn.Linear has)
        self.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return super().forward(input)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_covers_model_and_criterion(name, dtype) -> None:
    booster, model = Booster(device="cpu", mixed_precision=name), PreTrained(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, optim, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    logits = wrapped(torch.ones(2, 4))
    assert logits.dtype == dtype
    assert model.autocast == (True, dtype)
    loss = criterion(logits, torch.tensor([0, 1]))
    assert loss.dtype == torch.float32
    booster.backward(loss, optim)
    optim.step()
    assert model.weight.dtype == model.weight.grad.dtype == optim.state[model.weight]["exp_avg"].dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def save_and_resume(folder: str, shard: bool, use_safetensors: bool) -> list[bool]:
    """Train on without a break, and from a checkpoint: the same."""
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16")
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
    one_step(booster, model, optimizer)
    schedule.step()
    path = Path(folder)
    booster.save_model(model, path / "model", shard=shard, use_safetensors=use_safetensors, size_per_shard=1)
    booster.save_optimizer(optimizer, path / "optimizer", shard=shard, size_per_shard=1)
    booster.save_lr_scheduler(schedule, path / "schedule")
    again = Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16")
    twin = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=9.0)
    twin_schedule = torch.optim.lr_scheduler.StepLR(twin_optimizer, 1, gamma=0.5)
    twin, twin_optimizer, _, _, twin_schedule = again.boost(twin, twin_optimizer, lr_scheduler=twin_schedule)
    twin_optimizer.scaler.load_state_dict(twin_optimizer.scaler.state_dict() | {"scale": 2.0})
    assert again.load_model(twin, path / "model") is twin
    again.load_optimizer(twin_optimizer, path / "optimizer")
    again.load_lr_scheduler(twin_schedule, path / "schedule")
    same = [twin_optimizer.scaler.scale_value == optimizer.scaler.scale_value]
    for _ in range(3):
        losses = [one_step(booster, model, optimizer), one_step(again, twin, twin_optimizer)]
        schedule.step()
        twin_schedule.step()
        same.append(torch.equal(*losses))
    states = model.unwrap().state_dict(), twin.unwrap().state_dict()
    return [*same, all(torch.equal(states[0][name], states[1][name]) for name in states[0])]


@pytest.mark.parametrize(("shard", "use_safetensors"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(shard, use_safetensors, tmp_path) -> None:
    for rank in run_processes(save_and_resume, 2, str(tmp_path), shard, use_safetensors):
        assert all(rank)


def load_nothing(folder: str) -> str:
    booster = Booster(plugin=TorchDDPPlugin())
    model, *_ = booster.boost(*parts())
    with pytest.raises(CheckpointError) as error:
        booster.load_model(model, Path(folder) / "nothing")
    return str(error.value)


def test_a_missing_checkpoint_is_an_error_on_all_ranks(tmp_path) -> None:
    first, second = run_processes(load_nothing, 2, str(tmp_path))
    assert first == second
    assert "nothing" in first


def save_gpt2(folder: str) -> torch.Tensor:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
    booster = Booster(plugin=TorchDDPPlugin())
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    model.eval()
    for kind, use_safetensors in (("bin", False), ("safetensors", True)):
        booster.save_model(model, Path(folder) / kind, shard=True, size_per_shard=1, use_safetensors=use_safetensors)
    return model(torch.arange(32)[None]).logits.detach()


def test_hugging_face_loads_what_ddp_saved(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import GPT2LMHeadModel

    logits, _ = run_processes(save_gpt2, 2, str(tmp_path))
    for kind in ("bin", "safetensors"):
        model = GPT2LMHeadModel.from_pretrained(tmp_path / kind)
        assert torch.equal(model.eval()(torch.arange(32)[None]).logits, logits)


def test_two_meshes_give_two_sizes_of_data_parallelism() -> None:
    with fake_world(8, rank=5), ParallelMesh(tp=2):
        assert TorchDDPPlugin().data_parallel_rank_and_size() == (2, 4)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, HybridAdam])
def test_a_misspelled_hyperparameter_of_a_group_is_refused(kind: type[torch.optim.AdamW]) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "weight_decays": 0.0}, {"params": [model.bias], "lr_scale": 0.5}]
    optimizer = kind(groups, lr=0.1)
    with pytest.raises(
        ConfigError, match=f"{kind.__name__} reads .*Found weight_decays=0.0.*Did you mean weight_decay"
    ):
        Booster(device="cpu").boost(model, optimizer)
    del optimizer.param_groups[0]["weight_decays"]
    boosted, *_ = Booster(device="cpu").boost(model, CombinedOptimizer(optimizer))
    assert boosted.unwrap() is model
