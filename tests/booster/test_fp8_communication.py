"""Gradients that travel in 8 bits, under every plugin: how far a step is off, that ranks agree, and what is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal import nn as parallel
from colossal.booster import Booster
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
from colossal.errors import ConfigError, UnsupportedError
from colossal.testing import run_processes, run_threads

pytestmark = pytest.mark.slow

PLUGINS: dict[str, Callable[..., Plugin]] = {
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": lambda **options: LowLevelZeroPlugin(precision="fp32", **options),
    "ZeRO-2": lambda **options: LowLevelZeroPlugin(2, precision="fp32", **options),
    "ZeRO with replicas": lambda **options: LowLevelZeroPlugin(precision="fp32", extra_dp_size=2, **options),
    "Gemini": lambda **options: GeminiPlugin(precision="fp32", **options),
    "Hybrid": lambda tp_size=1, **options: HybridParallelPlugin(tp_size, 1, precision="fp32", **options),
    "Hybrid with ZeRO-1": lambda tp_size=1, **options: HybridParallelPlugin(
        tp_size, 1, precision="fp32", zero_stage=1, **options
    ),
    "stages": lambda **options: HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2, **options),
    "stages with ZeRO-1": lambda **options: HybridParallelPlugin(
        1, 2, precision="fp32", num_microbatches=2, zero_stage=1, **options
    ),
}
RANKS = {"stages": 4, "stages with ZeRO-1": 4, "ZeRO with replicas": 4}
WIDTH = 64


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).sin().view_as(parameter) / 8)
    return model


def batch_of(rank: int) -> torch.Tensor:
    return torch.linspace(rank, rank + 3, 4 * WIDTH).cos().view(4, WIDTH)


def loss_of(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (outputs - batch.flip(1)).square().mean()


def step(name: str, **options: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Parameters of this rank after a step of gradient descent, and the bytes of gradients that it sent."""
    plugin = PLUGINS[name](**options)
    model = net()
    booster = Booster(device="cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert optimizer is not None
    place, _ = plugin.data_parallel_rank_and_size()
    with CommCounter() as counter:
        booster.execute_pipeline(iter([batch_of(place)]), model, loss_of, optimizer)
        optimizer.step()
    reductions = [("all_reduce", "dp"), ("reduce_scatter", "dp")]
    sent = sum(counter.bytes[each] for each in reductions)  # type: ignore[index]
    if name.startswith("stages"):
        here = model.unwrap().state_dict()
        return {key.removeprefix("stages.0.module."): value.clone() for key, value in here.items()}, sent
    return model.state_dict(only_rank_0=False), sent


def of_stages() -> dict[str, Any]:
    return {name: [step(name), step(name, fp8_communication=True)] for name in PLUGINS if name.startswith("stages")}


@pytest.fixture(scope="module")
def stages() -> list[dict[str, Any]]:
    return run_processes(of_stages, 4)


def gradients(rank: int) -> dict[str, torch.Tensor]:
    """Those of one process on the batch of a rank."""
    model = net()
    loss_of(model(batch_of(rank)), batch_of(rank)).backward()
    return {key: each.grad for key, each in model.named_parameters() if each.grad is not None}


def magnitudes(num_ranks: int, first: int = 0) -> dict[str, torch.Tensor]:
    """The mean of the magnitudes of the ranks' gradients."""
    found = [gradients(rank) for rank in range(first, first + num_ranks)]
    return {key: torch.stack([each[key].abs() for each in found]).mean(0) for key in found[0]}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_step_is_off_by_the_rounding_of_gradients_alone(name: str, request) -> None:
    size = RANKS.get(name, 2)
    if name.startswith("stages"):
        found = [rank[name] for rank in request.getfixturevalue("stages")]
        exact, packed = [both[0] for both in found], [both[1] for both in found]
    else:
        exact = run_threads(step, size, name)
        packed = run_threads(step, size, name, fp8_communication=True)
    allowed = magnitudes(size // (2 if name.startswith("stages") else 1))
    largest = max(float(each.max()) for each in allowed.values())
    changed = 0
    for (expected, sent), (parameters, sent_packed) in zip(exact, packed, strict=True):
        for key, value in parameters.items():
            # Terms are rounded to 1/16, and so may be their sum; with replicas also the sums of a group.
            off = (value - expected[key]).abs()
            assert (off <= (1.0625**3 - 1) * allowed[key] + 1e-5 * largest).all(), key
            changed += int((off > 0).sum())
        by_torch = sum(value.nbytes for value in parameters.values()) // 2  # which is not counted
        assert 0 < sent_packed < 0.3 * (by_torch if name == "FSDP" else sent)
    assert changed > WIDTH
    for parameters, _ in packed:  # replicas are equal to the bit
        for other, _ in packed:
            if parameters.keys() == other.keys():
                assert all(torch.equal(other[key], value) for key, value in parameters.items())


OVERFLOWING: dict[str, Callable[[], Plugin]] = {
    "DDP": lambda: TorchDDPPlugin(fp8_communication=True),
    "ZeRO-2": lambda: LowLevelZeroPlugin(2, fp8_communication=True, hysteresis=1),
    "Gemini": lambda: GeminiPlugin(fp8_communication=True, hysteresis=1),
}


def overflow(name: str) -> tuple[float, bool]:
    """Let the gradients of one rank be infinite; return the scale then, and whether nothing was updated."""
    model = net()
    booster = Booster(device="cpu", mixed_precision="fp16", plugin=OVERFLOWING[name]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert optimizer is not None
    before = {key: value.clone() for key, value in model.state_dict(only_rank_0=False).items()}
    rank, _ = booster.plugin.data_parallel_rank_and_size()
    booster.backward(model(batch_of(rank)).float().sum() * (float("inf") if rank else 1.0), optimizer)
    optimizer.step()
    after = model.state_dict(only_rank_0=False)
    return optimizer.scaler.scale_value, all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", OVERFLOWING)
def test_an_overflow_on_one_rank_is_seen_by_all(name: str) -> None:
    assert run_threads(overflow, 2, name) == [(2.0**15, True)] * 2


@pytest.mark.parametrize("plugin", [LowLevelZeroPlugin, lambda **options: HybridParallelPlugin(1, 1, 1, **options)])
def test_two_dtypes_for_gradients_contradict_each_other(plugin: Callable[..., Plugin]) -> None:
    with pytest.raises(ConfigError, match=r"Found communication_dtype=torch.bfloat16 and fp8_communication=True"):
        plugin(communication_dtype=torch.bfloat16, fp8_communication=True)


def test_tensor_parallel_ranks_reduce_over_dp_alone() -> None:
    def program() -> int:
        with ParallelMesh(tp=2):
            model = nn.Sequential(parallel.Linear1D_Col(WIDTH, WIDTH))
            booster = Booster(device="cpu", plugin=TorchDDPPlugin(fp8_communication=True))
            model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
            assert optimizer is not None
            with CommCounter() as counter:
                booster.backward(model(batch_of(0)).square().mean(), optimizer)
        return counter.bytes["all_reduce", "dp"]

    numel = WIDTH * WIDTH // 2 + WIDTH // 2
    assert run_threads(program, 4) == [numel + 4 * -(-numel // 1024)] * 4


ON_TP = ("DDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1")


def refused_on_tp(name: str) -> None:
    """Biases of all ranks stand beside shards, whose magnitudes decide how they are rounded."""
    with ParallelMesh(tp=2):
        model = nn.Sequential(parallel.Linear(WIDTH, WIDTH), nn.Tanh(), parallel.Linear(WIDTH, WIDTH))
        plugin = PLUGINS[name](fp8_communication=True, **({"tp_size": 2} if name.startswith("Hybrid") else {}))
        with pytest.raises(UnsupportedError, match="Found fp8_communication=True with shards next to replicated"):
            Booster(device="cpu", plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("name", ON_TP)
def test_replicated_parameters_beside_shards_are_refused(name: str) -> None:
    run_threads(refused_on_tp, 4, name)


def refused_in_tied_stages() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    plugin = PLUGINS["stages"](fp8_communication=True)
    with pytest.raises(UnsupportedError, match="tied parameters of several pipeline stages"):
        Booster(device="cpu", plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_tied_stages_are_refused() -> None:
    run_processes(refused_in_tied_stages, 2)


def accumulated(name: str, fp8: bool) -> dict[str, torch.Tensor]:
    """Parameters after two backward passes and a step."""
    model = net()
    booster = Booster(device="cpu", plugin=PLUGINS[name](fp8_communication=fp8))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert optimizer is not None
    place, _ = booster.plugin.data_parallel_rank_and_size()
    with booster.no_sync(model, optimizer):
        booster.backward(loss_of(model(batch_of(place + 2)), batch_of(place + 2)), optimizer)
    booster.backward(loss_of(model(batch_of(place)), batch_of(place)), optimizer)
    optimizer.step()
    return model.state_dict(only_rank_0=False)


@pytest.mark.parametrize("name", ["DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1"])
def test_accumulated_gradients_are_off_by_their_rounding_alone(name: str) -> None:
    (expected, *_), found = run_threads(accumulated, 2, name, False), run_threads(accumulated, 2, name, True)
    first, second = magnitudes(2), magnitudes(2, first=2)
    allowed = {key: 0.13 * (first[key] + second[key]) for key in first}  # two roundings to 1/16
    largest = max(float(each.max()) for each in allowed.values())
    for key, value in expected.items():
        assert ((found[0][key] - value).abs() <= allowed[key] + 1e-4 * largest).all(), key
        assert not torch.equal(found[0][key], value)
        assert torch.equal(found[0][key], found[1][key])
