# pyright: reportArgumentType=false
"""States of another algorithm are refused when they are loaded; those of other implementations are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from colossal.booster import Booster
from colossal.errors import CheckpointError, ConfigError
from colossal.interface import OptimizerWrapper
from colossal.nn import optimizer as optimizers

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": optimizers.Adafactor,
    "CAME": lambda held: optimizers.CAME(held, lr=0.1),
    "HybridAdam": optimizers.HybridAdam,
    "CPUAdam": optimizers.CPUAdam,
    "Lamb": optimizers.Lamb,
    "FusedLAMB": optimizers.FusedLAMB,
    "Lars": lambda held: optimizers.Lars(held, momentum=0.9),
    "FusedSGD": lambda held: optimizers.FusedSGD(held, lr=0.1, momentum=0.9),
    "GaLoreAdamW": lambda held: optimizers.GaLoreAdamW(
        [{"params": held[:1], "rank": 2}, {"params": held[1:], "weight_decay": 0.0}], lr=0.1
    ),
    "torch Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
    "SGD": lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9),
}
INTERCHANGEABLE = [{"HybridAdam", "CPUAdam", "AdamW"}, {"Lamb", "FusedLAMB"}, {"FusedSGD", "SGD"}]


def stepped(kind: str) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(6, 4)
    optimizer = KINDS[kind](list(model.parameters()))
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", ["AdamW", "CPUAdam", "FusedLAMB", "SGD", "torch Adafactor"])
def test_states_are_loaded_by_their_own_algorithm_only(kind: str, tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    saved, trained = stepped(kind)
    _, wrapped, *_ = booster.boost(saved, trained)
    booster.save_optimizer(wrapped, tmp_path / "saved")
    for other in KINDS:
        model, optimizer = stepped(other)
        if kind == other or any({kind, other} <= kinds for kinds in INTERCHANGEABLE):
            OptimizerWrapper(optimizer).load_state_dict(trained.state_dict())
            _, boosted, *_ = booster.boost(model, optimizer)
            booster.load_optimizer(boosted, tmp_path / "saved")
            boosted.step()
            continue
        before = optimizer.state_dict()["param_groups"]
        with pytest.raises((ConfigError, ValueError), match="states of the algorithm|different number of param"):
            OptimizerWrapper(optimizer).load_state_dict(trained.state_dict())
        _, boosted, *_ = booster.boost(model, optimizer)
        with pytest.raises(CheckpointError, match="algorithm that was saved|parameter groups"):
            booster.load_optimizer(boosted, tmp_path / "saved")
        assert optimizer.state_dict()["param_groups"] == before


def test_a_plain_optimizer_of_the_library_refuses_them_too() -> None:
    _, adam = stepped("AdamW")
    _, lamb = stepped("Lamb")
    with pytest.raises(ConfigError, match=r"hyperparameters betas, where Lamb has adam, betas\. Build the optimizer"):
        lamb.load_state_dict(adam.state_dict())
    _, adamax = stepped("Adamax")
    with pytest.raises(ConfigError, match="states exp_avg, exp_inf, step, where HybridAdam has exp_avg, exp_avg_sq"):
        stepped("HybridAdam")[1].load_state_dict(adamax.state_dict())


def test_states_before_a_step_and_options_of_versions_are_no_other_algorithm() -> None:
    held = [torch.nn.Parameter(torch.ones(3, device="cpu"))]
    state = torch.optim.AdamW(held, lr=0.5).state_dict()
    for name in ("amsgrad", "foreach", "decoupled_weight_decay"):
        del state["param_groups"][0][name]
    state["param_groups"][0]["initial_lr"] = 0.5
    optimizer = optimizers.HybridAdam(held)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_combined_optimizers_have_the_algorithm_of_each_group() -> None:
    def combined(*kinds: str) -> tuple[torch.nn.Linear, Any]:
        model = torch.nn.Linear(6, 4)
        held = (model.weight, model.bias)
        optimizer = optimizers.CombinedOptimizer(*(KINDS[kind]([one]) for kind, one in zip(kinds, held, strict=True)))
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    _, saved = combined("AdamW", "SGD")
    OptimizerWrapper(combined("HybridAdam", "FusedSGD")[1]).load_state_dict(saved.state_dict())
    with pytest.raises(ConfigError, match="betas, where SGD has dampening"):
        OptimizerWrapper(combined("SGD", "AdamW")[1]).load_state_dict(saved.state_dict())
