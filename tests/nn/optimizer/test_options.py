"""What cannot be honoured is refused, and the message says what to do."""

from typing import Any

import pytest
import torch
from torch import nn

from colossal.errors import ConfigError, UnsupportedError
from colossal.nn import optimizer as optimizers


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


WRONG = [
    ("CPUAdam", {"lr": -1.0}, "lr is a finite number of at least 0. Found -1.0"),
    ("CPUAdam", {"lr": float("nan")}, "lr is"),
    ("HybridAdam", {"betas": (0.9, 1.0)}, "betas is at least 0 and below 1"),
    ("FusedAdam", {"eps": "small"}, "eps is"),
    *((name, {"betas": 0.9}, "betas are a decay rate of each") for name in ("CPUAdam", "Lamb", "GaLoreAdamW")),
    ("HybridAdam", {"weight_decays": 0.1}, "Found weight_decays=0.1, which it would ignore. Did you mean weight_decay"),
    ("Lamb", {"weight_decay": -0.1}, "weight_decay is"),
    ("Lars", {"momentum": -0.1}, "momentum is"),
    ("FusedSGD", {"lr": 0.1, "nesterov": True}, "needs momentum and no dampening"),
    ("FusedSGD", {"lr": 0.1, "nesterov": True, "momentum": 0.5, "dampening": 0.5}, "needs momentum and no dampening"),
    ("CAME", {}, "CAME needs a learning rate"),
    ("DistributedCAME", {}, "CAME needs a learning rate"),
    ("CAME", {"lr": 0.1, "clip_threshold": 0.0}, "clip_threshold is"),
    ("Adafactor", {"lr": 0.1}, "Adafactor has a learning rate, or relative_step=True"),
    ("Adafactor", {"relative_step": False}, "Adafactor has a learning rate, or relative_step=True"),
    ("Adafactor", {"lr": 0.1, "relative_step": False, "warmup_init": True}, "which warmup_init needs"),
    ("Adafactor", {"decay_rate": 0.8}, "decay_rate is a finite number of at most 0"),
]
NOT_BUILT = [
    ("FusedAdam", {"amsgrad": True}, "amsgrad"),
    ("FusedLAMB", {"amsgrad": True}, "amsgrad"),
    ("HybridAdam", {"amsgrad": True}, "amsgrad"),
    ("HybridAdam", {"maximize": True}, "maximize"),
    *(
        (name, {option: value}, option)
        for name in ("GaLoreAdamW8bit", "DistGaloreAwamW")
        for option, value in (
            ("nbits", 4),
            ("min_8bit_size", 1),
            ("percentile_clipping", 5),
            ("block_wise", False),
            ("is_paged", True),
            ("args", object()),
        )
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_numbers_are_refused(name, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(optimizers, name)(params(), **options)


@pytest.mark.parametrize(("name", "options", "message"), NOT_BUILT)
def test_what_is_not_built_is_refused(name, options, message) -> None:
    with pytest.raises(UnsupportedError, match=f"does not have {message} other than by default"):
        getattr(optimizers, name)(params(), **options)


@pytest.mark.parametrize("group", [{"rank": 0}, {"rank": 2, "update_proj_gap": 0}, {"rank": 2, "proj_type": "up"}])
def test_wrong_numbers_of_a_group_are_refused_and_the_group_is_not_added(group) -> None:
    optimizer = optimizers.GaLoreAdamW(params())
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": params(), **group})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["CPUAdam", "Lamb", "FusedSGD"])
def test_sparse_gradients_and_other_numbers_are_refused(name) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = getattr(optimizers, name)(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="dense gradients. Found one in torch.sparse_coo"):
        optimizer.step()
    with pytest.raises(UnsupportedError, match="Found one in torch.complex64"):
        getattr(optimizers, name)([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)


def test_weight_decay_after_momentum_is_not_in_the_momentum() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = optimizers.FusedSGD([weight], lr=0.1, momentum=0.5, weight_decay=0.5, wd_after_momentum=True)
    weight.grad = torch.tensor([1.0])
    optimizer.step()
    assert weight.item() == pytest.approx(2 - 0.1 * (1 + 0.5 * 2))
    assert optimizer.state[weight]["momentum_buffer"].item() == 1.0


def test_galore_groups() -> None:
    class T5LayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    model = nn.Sequential(nn.Embedding(5, 3), T5LayerNorm(), nn.Linear(3, 4), nn.Conv1d(4, 2, 3, bias=False))
    model[0].weight.requires_grad_(False)
    projected, other, undecayed = optimizers.get_galore_param_groups(model, 0.1, 2, 7, 0.5, "left")
    assert projected.pop("params") == [model[2].weight]
    assert projected == {"rank": 2, "update_proj_gap": 7, "scale": 0.5, "proj_type": "left", "weight_decay": 0.1}
    assert other == {"params": [model[3].weight], "weight_decay": 0.1}
    assert undecayed["params"] == [model[1].weight, model[2].bias]
    assert undecayed["weight_decay"] == 0.0
    assert [len(group["params"]) for group in optimizers.get_galore_param_groups(nn.Linear(2, 2, bias=False), 0.1)] == [
        1
    ]


@pytest.mark.parametrize("name", ["HybridAdam", "CPUAdam", "FusedSGD", "Lamb"])
@pytest.mark.parametrize("option", ["maximize", "amsgrad", "differentiable"])
def test_states_and_groups_of_torch_whose_steps_are_others_are_refused(name: str, option: str) -> None:
    own = params()
    optimizer = getattr(optimizers, name)(own, lr=0.1)
    options: Any = {option: True}
    state = torch.optim.AdamW(own, lr=0.5, **options).state_dict()
    with pytest.raises(UnsupportedError, match=f"does not have {option} other than by default"):
        optimizer.load_state_dict(state)
    with pytest.raises(UnsupportedError, match=f"does not have {option} other than by default"):
        optimizer.add_param_group({"params": params(), option: True})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.param_groups) == 1
