"""What a program writes where the optimizer holds weights counts: in rounded copies, and without a booster."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from small_models import BATCHES, net

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from colossal.errors import ConfigError
from colossal.testing import run_processes
from colossal.zero import zero_model_wrapper, zero_optim_wrapper

IN_BF16: dict[str, Callable[[], Any]] = {
    "ZeRO": partial(LowLevelZeroPlugin, precision="bf16"),
    "Gemini": partial(GeminiPlugin, precision="bf16"),
    "Hybrid": partial(HybridParallelPlugin, tp_size=1, pp_size=1, precision="bf16"),
}


def _held(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def write_master_weights() -> dict[str, tuple[list[float], str]]:
    """Write float32 copies by a number that bfloat16 has; then once more after values of the model."""
    results: dict[str, tuple[list[float], str]] = {}
    for name, plugin in IN_BF16.items():
        own = torch.nn.Linear(6, 2)
        model: Any
        optimizer: Any
        model, optimizer, *_ = Booster(device="cpu", plugin=plugin()).boost(own, torch.optim.SGD(own.parameters()))
        first = model.state_dict(only_rank_0=False)
        for parameter in _held(optimizer):
            parameter.data.fill_(0.5)
        outputs = model(torch.ones(4, 6)).flatten().tolist()
        (model if name == "Gemini" else own).load_state_dict(first)
        for parameter in _held(optimizer):
            parameter.data.mul_(2.0)
        try:
            model(torch.ones(4, 6))
            results[name] = outputs, ""
        except ConfigError as error:
            results[name] = outputs, str(error)
    return results


def test_written_master_weights_are_rounded_into_the_model() -> None:
    for results in run_processes(write_master_weights, 2):
        for name, (outputs, message) in results.items():
            assert outputs == [3.5] * 8, name
            assert "both were written" in message, name


def decay_without_booster() -> dict[str, list[torch.Tensor]]:
    """Halve what the optimizer holds after a step of zeros, and read it by a pass and by a state dict."""
    results = {}
    for stage, precision in ((1, torch.float64), (2, torch.bfloat16), (3, torch.float64)):
        plain = net("").to(precision)
        chunks = {"mixed_precision": None} if stage > 2 else None
        model: Any = zero_model_wrapper(plain, zero_stage=stage, gemini_config=chunks)
        optimizer = zero_optim_wrapper(model, torch.optim.SGD(model.parameters(), lr=0.0))
        optimizer.backward(model(BATCHES[0].to(precision)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        read = partial(model.state_dict, only_rank_0=False) if stage > 2 else model.state_dict
        first = {name: each.clone() for name, each in read().items()}
        for parameter in _held(optimizer):
            parameter.data.mul_(0.5)
        outputs = model(BATCHES[0].to(precision)).detach()
        for parameter in _held(optimizer):
            parameter.data.mul_(0.5)
        state = read()
        half = net("").to(precision)
        half.load_state_dict({name: each * 0.5 for name, each in first.items()})
        wanted = half(BATCHES[0].to(precision)).detach()
        results[f"stage {stage}"] = [outputs, wanted, *(t for name in first for t in (state[name], first[name] * 0.25))]
    return results


def test_written_shards_count_without_a_booster() -> None:
    for results in run_processes(decay_without_booster, 2):
        for stage, tensors in results.items():
            for found, wanted in zip(tensors[::2], tensors[1::2], strict=True):
                torch.testing.assert_close(
                    found, wanted, rtol=1e-12, atol=0, msg=lambda text, at=stage: f"{at}: {text}"
                )
