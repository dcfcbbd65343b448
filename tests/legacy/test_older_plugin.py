"""A user's own plugin, written as the older documentation has it, runs with `Booster` and equals one process."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from colossal.booster import Booster
from colossal.checkpoint_io import GeneralCheckpointIO
from colossal.errors import ConfigError, UnsupportedError
from colossal.interface import ModelWrapper, OptimizerWrapper
from colossal.testing import assert_close, run_processes, run_threads

Plugin: Any = importlib.import_module("colossal.booster.plugin.plugin_base").Plugin
DPPluginBase: Any = importlib.import_module("colossal.booster.plugin.dp_plugin_base").DPPluginBase


class OwnPlugin(Plugin):
    """Data parallelism by torch; each method as an older program has it."""

    def supported_devices(self) -> list[str]:
        return ["cpu", "cuda"]

    def supported_precisions(self) -> list[str]:
        return ["fp16", "bf16"]

    def control_precision(self) -> bool:
        return False

    def control_device(self) -> bool:
        return False

    def control_checkpoint_io(self) -> bool:
        return False

    def support_no_sync(self) -> bool:
        return True

    def support_lora(self) -> bool:
        return False

    def configure(
        self, model: Any, optimizer: Any = None, criterion: Any = None, dataloader: Any = None, lr_scheduler: Any = None
    ) -> Any:
        assert "cpu" in self.supported_devices()
        model = ModelWrapper(DistributedDataParallel(model))
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = OptimizerWrapper(optimizer)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def get_checkpoint_io(self) -> Any:
        raise AssertionError("asked, although control_checkpoint_io() is False")

    @contextmanager
    def no_sync(self, model: Any, optimizer: Any = None) -> Iterator[None]:
        assert isinstance(optimizer, OptimizerWrapper)
        with model.module.no_sync():
            yield


class PlainPlugin(OwnPlugin):
    """Wraps nothing, keeps what it was given, and controls everything."""

    def __init__(self, *controlled: str) -> None:
        self.controlled, self.io = controlled, GeneralCheckpointIO()

    def supported_devices(self) -> list[str]:
        return [*super().supported_devices(), "npu"]

    def control_precision(self) -> bool:
        return "precision" in self.controlled

    def control_device(self) -> bool:
        return "device" in self.controlled

    def control_checkpoint_io(self) -> bool:
        return "checkpoint_io" in self.controlled

    def support_no_sync(self) -> bool:
        return False

    def configure(
        self, model: Any, optimizer: Any = None, criterion: Any = None, dataloader: Any = None, lr_scheduler: Any = None
    ) -> Any:
        return model, optimizer, criterion, dataloader, lr_scheduler

    def get_checkpoint_io(self) -> Any:
        return self.io


DATA = TensorDataset(torch.linspace(-1, 1, 24).view(12, 2).double(), torch.arange(12).double().view(12, 1))


def make(precision: str | None = None) -> tuple[Any, torch.optim.Optimizer]:
    """In half precision with an optimizer that makes no steps of rounding, as Adam does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    kind = torch.optim.Adam if precision is None else torch.optim.SGD
    return model, kind(model.parameters(), lr=0.01)


def train_serially(precision: str | None) -> list[torch.Tensor]:
    model, optimizer = make(precision)
    x, y = DATA.tensors
    for step in range(3):
        rows = slice(4 * step, 4 * step + 4)
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


def check_training(path: str, precision: str | None) -> None:
    model, optimizer = make(precision)
    parts: Any
    plugin = OwnPlugin()
    booster = Booster(plugin=plugin, mixed_precision=precision)
    loader = plugin.prepare_dataloader(DATA, batch_size=2)
    parts = booster.boost(model, optimizer, nn.MSELoss(), loader)
    model, optimizer, criterion, loader, _ = parts
    assert isinstance(model, ModelWrapper)
    for x, y in loader:
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    found = [each.detach() for each in model.unwrap().parameters()]
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if precision is None else {"rtol": 0.02, "atol": 0.02}
    for one, expected in zip(found, train_serially(precision), strict=True):
        assert_close(one, expected, "a parameter", **tolerance)
    booster.save_model(model, path)
    fresh, _ = make()
    fresh.load_state_dict(torch.load(path))
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), found, strict=True))
    check_accumulation(booster, model, optimizer, criterion)


def check_accumulation(booster: Booster, model: Any, optimizer: Any, criterion: Any) -> None:
    """Inside of no_sync ranks keep gradients of their own, and have the same ones after the next pass."""
    rank = dist.get_rank()
    x, y = (each[rank::2] for each in DATA.tensors)
    with booster.no_sync(model, optimizer):
        booster.backward(criterion(model(x), y), optimizer)
    own = model.unwrap()[0].weight.grad.clone()
    gathered = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    assert not torch.allclose(gathered[0], gathered[1])
    booster.backward(criterion(model(x), y), optimizer)
    dist.all_gather(gathered, model.unwrap()[0].weight.grad)
    assert torch.equal(*gathered)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_plugin_of_ones_own_equals_one_process(precision, tmp_path) -> None:
    run_processes(check_training, 2, str(tmp_path / "model.pt"), precision)


def test_what_the_plugin_returns_is_wrapped_and_what_it_controls_is_left_to_it() -> None:
    model, optimizer = make()
    plugin = PlainPlugin("checkpoint_io", "device")
    assert plugin.supported_devices() == ["cpu", "cuda", "npu"]
    booster = Booster(device="cpu", plugin=plugin)
    assert booster.checkpoint_io is plugin.io
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    assert boosted.unwrap() is model
    assert wrapped.unwrap() is optimizer
    x, y = DATA.tensors
    booster.backward(nn.functional.mse_loss(boosted(x), y), wrapped)
    assert model[0].weight.grad is not None
    with pytest.raises(UnsupportedError, match=r"PlainPlugin, whose support_no_sync\(\) is False"):
        booster.no_sync(boosted)


def test_what_a_plugin_does_not_support_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="takes mixed_precision 'fp16' or 'bf16'"):
        Booster(device="cpu", plugin=PlainPlugin(), mixed_precision="fp32")
    with pytest.raises(ConfigError, match="applies a precision of its own"):
        Booster(device="cpu", plugin=PlainPlugin("precision"), mixed_precision="bf16").boost(*make())
    with pytest.raises(UnsupportedError, match="LoRA needs a plugin that supports it. Found PlainPlugin"):
        Booster(device="cpu", plugin=PlainPlugin()).enable_lora(make()[0])

    class Short(PlainPlugin):
        def configure(self, model: Any, *others: Any) -> Any:
            return model, *others[:2]

    with pytest.raises(ConfigError, match="Found tuple from Short. Return all five"):
        Booster(device="cpu", plugin=Short()).boost(*make())

    class Wrapped(PlainPlugin):
        def configure(self, model: Any, optimizer: Any = None, *others: Any) -> Any:
            return model, type("OwnOptimizer", (OptimizerWrapper,), {})(optimizer), *others

    with pytest.raises(ConfigError, match="Found a OwnOptimizer from configure of Wrapped"):
        Booster(device="cpu", plugin=Wrapped(), mixed_precision="bf16").boost(*make())


def test_a_plugin_that_runs_batches_itself() -> None:
    class Running(PlainPlugin):
        def execute_pipeline(self, data_iter: Any, model: Any, *others: Any) -> Any:
            return {"loss": None, "outputs": model(next(data_iter)), "others": len(others)}

    booster = Booster(device="cpu", plugin=Running())
    model, *_ = booster.boost(make()[0])
    result = booster.execute_pipeline(iter([DATA.tensors[0]]), model, nn.functional.mse_loss)
    assert result["outputs"].shape == (12, 1)
    assert result["others"] == 4


def test_a_plugin_without_a_method_cannot_be_made() -> None:
    class Incomplete(Plugin):
        def configure(self, *parts: Any) -> Any:
            return parts

    with pytest.raises(TypeError, match="control_checkpoint_io.*supported_devices"):
        Incomplete()


def batches_of_ranks() -> list[list[int]]:
    own_methods = {name: vars(OwnPlugin)[name] for name in ("supported_devices", "supported_precisions", "configure")}
    answers = {f"control_{what}": lambda _: False for what in ("device", "precision", "checkpoint_io")}
    kind: Any = type("Own", (DPPluginBase,), {**own_methods, **answers, "get_checkpoint_io": lambda _: None})
    with pytest.raises(TypeError, match="support_no_sync"):
        kind()
    kind.support_no_sync = lambda _: False
    kind.__abstractmethods__ = frozenset()
    with pytest.raises(UnsupportedError, match=r"no_sync needs a plugin that has it\. Found Own"):
        kind().no_sync(nn.Linear(1, 1))
    return [batch[0].tolist() for batch in kind().prepare_dataloader(TensorDataset(torch.arange(8)), batch_size=2)]


def test_a_plugin_for_replicas_shards_a_dataset() -> None:
    first, second = run_threads(batches_of_ranks, 2)
    assert sorted(number for batch in first + second for number in batch) == list(range(8))
    assert len(first) == len(second) == 2
