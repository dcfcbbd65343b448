# pyright: reportArgumentType=false, reportCallIssue=false
"""What forward passes write into parameters counts, or is refused where it would be freed with gathered copies."""

from functools import partial
from typing import Any

import pytest
import torch
from plugins import plugins
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from colossal._src.interface import digests_of
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, TorchFSDPPlugin
from colossal.errors import UnsupportedError
from colossal.testing import assert_close, run_processes

KEEPS = ("DDP", "ZeRO-1", "ZeRO-2", "Hybrid", "Hybrid with ZeRO-1")
PLUGINS = plugins(*KEEPS, "FSDP", "Gemini") | {
    "FSDP, SHARD_GRAD_OP": partial(TorchFSDPPlugin, sharding_strategy="SHARD_GRAD_OP"),
    "Gemini, small chunks": partial(GeminiPlugin, precision="fp32", chunk_config_dict={2: {"chunk_size": 40}}),
    "Gemini, in host memory": partial(GeminiPlugin, precision="fp32", placement_policy="cpu"),
}
DATA = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class MovingAverage(nn.Module):
    """Moves a second encoder towards the first in each pass, as momentum contrast does."""

    def __init__(self, by_data: bool, in_forward: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = nn.Linear(6, 4).double(), nn.Linear(6, 4).double().requires_grad_(False)
        self.by_data, self.in_forward = by_data, in_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_forward and self.training:
            self.move()
        return 1 - F.cosine_similarity(self.online(x), self.target(x * 1.1)).mean()

    @torch.no_grad()
    def move(self) -> None:
        for own, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            if self.by_data:
                target.data = target.data * 0.9 + own.data * 0.1
            else:
                target.mul_(0.9).add_(own, alpha=0.1)


class FirstBatch(nn.Module):
    """Sets a parameter from the first batch that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.shift = nn.Linear(6, 4).double(), nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.register_buffer("is_new", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.is_new:
            self.shift.data.fill_(0.5)
            self.is_new = torch.zeros(())
        return (self.layer(x) - self.shift).square().mean()


class AfterWarmUp(nn.Module):
    """Keeps a weight in bounds from the third training pass on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.num_passes = nn.Linear(6, 4).double(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_passes += self.training
        if self.num_passes > 2:
            self.layer.weight.data.clamp_(-0.05, 0.05)
        return self.layer(x).square().mean()


class Queue(nn.Module):
    """Moves the rows of a parameter by one in each training pass, as a queue of negative examples does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4).double()
        self.keys = nn.Parameter(torch.randn(5, 4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.keys.data.copy_(self.keys.data.roll(1, 0))
        return (self.layer(x) @ self.keys.T * torch.arange(5.0, dtype=torch.float64)).square().mean()


MODELS = {
    "moving average": partial(MovingAverage, by_data=False),
    "moving average by data": partial(MovingAverage, by_data=True),
    "first batch": FirstBatch,
    "rolled rows": Queue,
    "after warm-up": AfterWarmUp,
}


def train(plugin: Any, model: Any, between: bool = False) -> dict[str, torch.Tensor]:
    booster, rank = Booster(device="cpu", plugin=plugin), 0 if plugin is None else dist.get_rank()
    parameters = [each for each in model.parameters() if each.requires_grad]
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(parameters, lr=0.3, momentum=0.9))
    boosted.eval()
    with torch.no_grad():
        boosted(DATA[0])
    boosted.train()
    for x in DATA:
        booster.backward(boosted(x if plugin is None else x.chunk(dist.get_world_size())[rank]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if between:
            boosted.unwrap().move()
    return boosted.state_dict(only_rank_0=False)


def train_all(models: dict[str, Any]) -> dict[tuple[str, str], Any]:
    results: dict[tuple[str, str], Any] = {}
    for plugin, make in PLUGINS.items():
        for name, build in models.items():
            try:
                results[plugin, name] = train(make(), build())
            except UnsupportedError as error:
                results[plugin, name] = str(error)
    return results


def compiled() -> nn.Module:
    model = AfterWarmUp()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "models", [MODELS, pytest.param({"compiled": compiled}, marks=pytest.mark.slow)], ids=["plain", "compiled"]
)
def test_what_a_pass_writes_counts_or_is_refused_on_all_ranks(models: dict[str, Any]) -> None:
    expected = {name: train(None, build()) for name, build in models.items()}
    for results in run_processes(train_all, 2, models):
        for (plugin, name), found in results.items():
            if plugin in KEEPS:
                assert_close(found, expected[name])
            else:
                assert isinstance(found, str), (plugin, name)
                assert "frees the full parameters after a forward pass" in found


DTYPES = (torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_see_each_element_and_their_order(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0, 0.0, 0.0]).to(dtype)
    changed = values.clone().view(torch.uint8)
    changed[-1] += 1
    orders = [[1, 0, 2, 3, 4, 5, 6], [6, 0, 1, 2, 3, 4, 5], [5, 6, 0, 1, 2, 3, 4], [6, 5, 4, 3, 2, 1, 0]]
    others = [values.clone(), changed.view(dtype), *(torch.stack([values[i] for i in order]) for order in orders)]
    before, same, *after = digests_of([values, *others]).tolist()
    assert before == same
    assert before not in after
    assert len(set(after)) == len(after)


def test_digests_are_of_any_shape_and_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, scalar, columns = torch.empty(0, 3), torch.tensor(2.0), torch.arange(6.0).view(2, 3)
    monkeypatch.setattr("colossal._src.interface.pass_writes._BLOCK", 2)
    values = [empty, empty, scalar, scalar + 1, columns, columns.T.contiguous().T, columns.roll(2)]
    digests = digests_of(values).tolist()
    assert digests[0] == digests[1]
    assert digests[4] == digests[5]
    assert len(set(digests)) == len(digests) - 2


def remedies() -> list[dict[str, torch.Tensor]]:
    model = MovingAverage(by_data=False)
    between = train(TorchFSDPPlugin(), MovingAverage(by_data=False, in_forward=False), between=True)
    return [train(TorchFSDPPlugin(ignored_modules=[model.target]), model), between]


def test_the_remedies_equal_one_process() -> None:
    expected = [
        train(None, MovingAverage(by_data=False)),
        train(None, MovingAverage(by_data=False, in_forward=False), between=True),
    ]
    for found in run_processes(remedies, 2):
        assert_close(found, expected)


def keep_full() -> list[dict[str, torch.Tensor]]:
    config = {dist.get_world_size(): {"chunk_size": 40, "keep_gathered": True}}
    plugin = GeminiPlugin(precision="fp32", chunk_config_dict=config)
    return [train(plugin, MODELS[name]()) for name in MODELS]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_that_stay_full_keep_what_a_pass_writes(num_ranks: int) -> None:
    expected = [train(None, build()) for build in MODELS.values()]
    for found in run_processes(keep_full, num_ranks):
        assert_close(found, expected)


def trace_and_join(plugin: str) -> str:
    from torch.distributed.algorithms import Join

    model = nn.Linear(6, 4)
    boosted, *_ = Booster(device="cpu", plugin=PLUGINS[plugin]()).boost(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(AttributeError, match=r"plugin\.prepare_dataloader"):
        Join([boosted])
    try:
        traced: Any = torch.jit.trace(boosted, DATA[0].float())
    except UnsupportedError as error:
        return str(error)
    assert_close(traced(DATA[1].float()), model(DATA[1].float()))
    return ""


def trace_and_join_all() -> dict[str, str]:
    return {plugin: trace_and_join(plugin) for plugin in ("DDP", "FSDP", "Gemini")}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_pass_is_recorded_with_parameters_that_stay_or_refused() -> None:
    for messages in run_processes(trace_and_join_all, 2):
        assert messages.pop("DDP") == ""
        assert all("torch.jit.trace" in message for message in messages.values())
