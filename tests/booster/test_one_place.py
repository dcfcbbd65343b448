"""One argument for the precision, and one way to accumulate, under every plugin."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
from colossal.errors import ConfigError, UnsupportedError
from colossal.nn.optimizer import HybridAdam
from colossal.testing import run_processes, run_threads

PLUGINS: dict[str, Callable[[], Plugin | None]] = {
    "none": lambda: None,
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": LowLevelZeroPlugin,
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
    "Gemini": GeminiPlugin,
    "Hybrid": lambda: HybridParallelPlugin(1, 1),
    "Hybrid with ZeRO-1": lambda: HybridParallelPlugin(1, 1, zero_stage=1),
    "Hybrid with ZeRO-2": lambda: HybridParallelPlugin(1, 1, zero_stage=2),
    "stages": lambda: HybridParallelPlugin(1, 2, num_microbatches=2),
    "stages with ZeRO-1": lambda: HybridParallelPlugin(1, 2, num_microbatches=2, zero_stage=1),
}
CASTS = ("ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1", "Hybrid with ZeRO-2", "stages",
         "stages with ZeRO-1")  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    return model.to(dtype)


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()


def dtype_in(name: str, precision: str) -> tuple[torch.dtype, bool]:
    booster = Booster(device="cpu", mixed_precision=precision, plugin=PLUGINS[name]())
    model: Any
    model, optimizer, *_ = booster.boost(own := net(), torch.optim.SGD(own.parameters(), lr=0.1))
    assert optimizer is not None
    batch = torch.ones(4, 4), torch.zeros(4, 2)
    booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
    optimizer.step()
    return next(model.parameters()).dtype, getattr(optimizer.scaler, "scale_value", 1.0) > 1


def of_stages() -> dict[str, Any]:
    """Messages between stages need processes: what is tried there, all at once."""
    return {
        name: [accumulate(name), *(dtype_in(name, precision) for precision in DTYPES)]
        for name in PLUGINS
        if name.startswith("stages")
    }


@pytest.fixture(scope="module")
def stages() -> list[dict[str, Any]]:
    return run_processes(of_stages, 2)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", PLUGINS)
def test_every_plugin_takes_the_precision_of_the_booster(name: str, precision: str, request) -> None:
    if name.startswith("stages"):
        ranks = [rank[name][1 + list(DTYPES).index(precision)] for rank in request.getfixturevalue("stages")]
    else:
        ranks = run_threads(dtype_in, 2, name, precision)
    for dtype, is_scaled in ranks:
        assert dtype == (DTYPES[precision] if name in CASTS else torch.float32)
        assert is_scaled is (precision == "fp16")


WITH_A_PRECISION: dict[str, Callable[..., Plugin]] = {
    "ZeRO": LowLevelZeroPlugin,
    "Gemini": GeminiPlugin,
    "Hybrid": lambda **options: HybridParallelPlugin(1, 1, **options),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])  # fp16 is what these plugins choose if nobody does
@pytest.mark.parametrize("name", WITH_A_PRECISION)
def test_two_precisions_contradict_each_other(name: str, precision: str) -> None:
    def program() -> None:
        plugin = WITH_A_PRECISION[name](precision=precision)
        with pytest.raises(
            ConfigError, match=rf"Found Booster\(mixed_precision='fp32'\) and .*Plugin\(precision='{precision}'"
        ):
            Booster(device="cpu", mixed_precision="fp32", plugin=plugin).boost(net())

    run_threads(program, 2)


WITHOUT_MASTERS: dict[str, Callable[..., Plugin]] = {
    "ZeRO-1": lambda **options: LowLevelZeroPlugin(master_weights=False, **options),
    "ZeRO-2": lambda **options: LowLevelZeroPlugin(stage=2, master_weights=False, **options),
    "Gemini": lambda **options: GeminiPlugin(master_weights=False, **options),
}


def train_in_half(name: str | None, precision: str, optimizer_class: Any) -> list[float]:
    """Losses of a model in half precision whose parameters are updated as they are."""
    model, losses = net(), []
    optimizer: Any = optimizer_class(model.parameters(), lr=0.05)
    if name is None:
        booster, model = None, model.to(DTYPES[precision])
    else:
        booster = Booster(device="cpu", mixed_precision=precision, plugin=WITHOUT_MASTERS[name]())
        model, optimizer, *_ = booster.boost(model, optimizer)
    x = torch.linspace(-1, 1, 32).sin().view(8, 4)
    for _ in range(5):
        loss = (model(x if booster else x.to(DTYPES[precision])).float() - x[:, :2]).square().mean()
        losses.append(float(loss.detach()))
        booster.backward(loss, optimizer) if booster else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.dtype == DTYPES[precision] for parameter in (optimizer.parameters if booster else []))
    return losses


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, HybridAdam])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", WITHOUT_MASTERS)
def test_parameters_in_half_precision_are_updated_as_they_are(name, precision, optimizer_class) -> None:
    expected = train_in_half(None, precision, optimizer_class)
    assert expected[-1] < expected[0]
    digits = 2.0**-11 if precision == "fp16" else 2.0**-8
    for losses in run_threads(train_in_half, 2, name, precision, optimizer_class):
        # Each of the steps rounds gradient and parameter once more or less than one process does.
        assert losses == pytest.approx(expected, rel=2 * len(losses) * digits)


@pytest.mark.parametrize("name", WITHOUT_MASTERS)
def test_a_step_without_masters_says_what_gets_lost_and_skips_overflows(name: str, caplog) -> None:
    def program() -> tuple[float, bool]:
        model = net()
        plugin = WITHOUT_MASTERS[name](precision="fp16", initial_scale=2.0**16, hysteresis=1)
        booster = Booster(device="cpu", plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert optimizer is not None
        before = {key: value.clone() for key, value in model.state_dict(only_rank_0=False).items()}
        booster.backward(model(torch.ones(2, 4)).float().sum() * 1e4, optimizer)
        optimizer.step()
        after = model.state_dict(only_rank_0=False)
        return optimizer.scaler.scale_value, all(torch.equal(after[key], before[key]) for key in before)

    with caplog.at_level("WARNING"):
        assert run_threads(program, 2) == [(2.0**15, True)] * 2
    assert "gradients below 6e-8 and small updates are lost" in caplog.text


def test_a_precision_that_a_plugin_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="takes mixed_precision 'fp16' or 'bf16' or 'fp32'. Found .*'fp8'"):
        Booster(device="cpu", mixed_precision="fp8", plugin=LowLevelZeroPlugin())


# ----------------------------------------------------------------------------------------------- accumulation


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    values = torch.linspace(-1, 1, 6 * 8 * 4, dtype=torch.float64).view(6, 8, 4).sin()
    return [(each, each[:, :2] * 2) for each in values]


def accumulate(name: str) -> dict[str, Any]:
    """Three steps of two passes each, the first of which is inside of no_sync."""
    plugin = PLUGINS[name]()
    booster = Booster(device="cpu", mixed_precision="fp32", plugin=plugin, max_norm=0.05)
    own = net(torch.float64)
    model, optimizer, *_ = booster.boost(own, torch.optim.Adam(own.parameters(), lr=0.1))
    assert optimizer is not None
    place, size = (0, 1) if plugin is None else plugin.data_parallel_rank_and_size()
    norms = []
    for number, batch in enumerate(batches()):
        part = tuple(each.chunk(size)[place] for each in batch)
        half = lambda outputs, batch: loss_of(outputs, batch) / 2  # noqa: E731
        if number % 2 == 0:
            with booster.no_sync(model, optimizer):
                booster.execute_pipeline(iter([part]), model, half, optimizer)
            continue
        booster.execute_pipeline(iter([part]), model, half, optimizer)
        norms.append(float(optimizer.get_grad_norm()))
        optimizer.step()
        optimizer.zero_grad()
    done = booster.execute_pipeline(iter(batches()[:1]), model, loss_of, return_outputs=True)
    return {"norms": norms, "outputs": done["outputs"]}


def one_process() -> tuple[list[float], torch.Tensor]:
    model, norms = net(torch.float64), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches()):
        (loss_of(model(batch[0]), batch) / 2).backward()
        if number % 2:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, model(batches()[0][0]).detach()


@pytest.mark.parametrize("name", [each for each in PLUGINS if each not in ("none", "FSDP")])
def test_no_sync_accumulates_under_every_plugin(name: str, request) -> None:
    norms, outputs = one_process()
    is_cut = name.startswith("stages")
    ranks = (
        [rank[name][0] for rank in request.getfixturevalue("stages")] if is_cut else run_threads(accumulate, 2, name)
    )
    for rank in ranks:
        torch.testing.assert_close(rank["norms"], norms, rtol=1e-10, atol=0)
    found = [rank["outputs"] for rank in ranks if rank["outputs"] is not None]
    assert len(found) == (1 if is_cut else 2)
    for each in found:
        torch.testing.assert_close(each.double(), outputs, rtol=1e-9, atol=1e-12)


def test_settings_that_a_plugin_would_ignore_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes a precision by its name. Found .*Pass mixed_precision='fp16'"):
        Booster(device="cpu", mixed_precision=FP16TorchMixedPrecision(init_scale=8.0), plugin=LowLevelZeroPlugin())
