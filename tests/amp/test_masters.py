# pyright: reportCallIssue=false
"""Float32 masters of half-precision parameters, and the model that is cast."""

import copy

import pytest
import torch
from torch import nn

from colossal._src.amp import MasterWeights, NoScaler
from colossal._src.amp.half_precision import cast_floats, cast_model, castable_parameters
from colossal.errors import ConfigError
from colossal.interface import OptimizerWrapper

SMALL = 2.0**-13
"""An update that a float16 number of size 1 cannot show: its neighbours are 2**-11 and 2**-10 away."""


def build(log_zeros: bool = False) -> tuple[list[nn.Parameter], torch.optim.Optimizer, MasterWeights]:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=1.0)
    return parameters, optimizer, MasterWeights(optimizer, parameters, torch.float16, log_zeros)


def test_small_updates_add_up_in_the_masters() -> None:
    (first, second), optimizer, masters = build()
    for step in range(1, 17):
        first.grad = torch.full_like(first, -SMALL)
        masters.copy_grads_to_masters()
        optimizer.step()
        optimizer.zero_grad()
        masters.copy_params_from_masters()
        (master,) = (master for master, working in masters.pairs.items() if working is first)
        assert torch.equal(master, torch.full_like(master, 1 + step * SMALL))
        assert torch.equal(first, master.half())
    assert first[0] == 1 + 2 * 2**-10
    assert torch.equal(second, torch.ones_like(second))


def test_masters_take_the_places_and_the_state_of_their_parameters() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    parameters[1].requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam([{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:3]}], lr=0.1)
    parameters[0].grad = torch.ones(3)
    optimizer.step()
    before = optimizer.state[parameters[0]]["exp_avg"].clone()
    masters = MasterWeights(optimizer, parameters)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [masters.pairs[master] for master in held] == parameters[:3]
    assert [master.dtype for master in held] == [torch.float32] * 3
    assert [working.dtype for working in parameters] == [torch.float16] * 3 + [torch.float32]
    assert [master.requires_grad for master in held] == [True, False, True]
    assert torch.equal(optimizer.state[held[0]]["exp_avg"], before)
    assert parameters[0] not in optimizer.state
    assert torch.equal(held[0].grad, torch.ones(3))
    assert parameters[0].grad is None


def test_a_half_precision_model_gets_masters_of_its_own_memory() -> None:
    parameter = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    masters = MasterWeights(optimizer, [parameter])
    (master,) = masters.pairs
    with torch.no_grad():
        master.fill_(7.0)
    assert torch.equal(parameter, torch.full_like(parameter, 0.1))


def test_gradients_move_and_add_up() -> None:
    (first, second), optimizer, masters = build()
    for _ in range(2):
        first.grad = torch.full_like(first, 3.0)
        masters.copy_grads_to_masters()
        assert first.grad is None
    grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    assert torch.equal(grads[0], torch.full((3,), 6.0))
    assert grads[1] is None
    first.grad = torch.ones_like(first)
    second.grad = torch.ones_like(second)
    masters.zero_grad(set_to_none=False)
    assert torch.equal(first.grad, torch.zeros_like(first))
    masters.zero_grad()
    assert first.grad is second.grad is None


def test_values_that_are_written_into_the_model_reach_the_masters() -> None:
    (first, second), optimizer, masters = build()
    own = {working: master for master, working in masters.pairs.items()}
    with torch.no_grad():
        own[first].add_(SMALL)
        own[second].add_(SMALL)
        first[0] = 5.0
    first.grad = torch.zeros_like(first)
    masters.copy_grads_to_masters()
    optimizer.step()
    masters.copy_params_from_masters()
    assert own[first].tolist() == [5.0, 1 + SMALL, 1 + SMALL]
    assert own[second].tolist() == [1 + SMALL] * 3
    assert first.tolist() == [5.0, 1.0, 1.0]
    first.data[1] = 6.0  # past torch's counter
    masters.copy_grads_to_masters()
    assert own[first][1] == 1 + SMALL
    masters.refresh()
    assert own[first].tolist() == [5.0, 6.0, 1 + SMALL]


def test_zeros_are_counted_if_wanted(logged) -> None:
    (first, second), _, masters = build(log_zeros=True)
    first.grad = torch.tensor([0.0, 1.0, 2.0**-30]).half()
    second.grad = torch.ones_like(second)
    masters.copy_grads_to_masters()
    masters.copy_grads_to_masters()
    quiet = build()
    quiet[0][0].grad = torch.ones_like(first)
    quiet[2].copy_grads_to_masters()
    assert logged() == ["[rank 0] 2 of 6 gradient elements are 0 (33.3%)"]


# ------------------------------------------------------------------------------------------ in the wrapper


def wrapped(scaler=None) -> tuple[nn.Module, OptimizerWrapper]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    masters = MasterWeights(optimizer, castable_parameters(model))
    return model, OptimizerWrapper(optimizer, scaler or NoScaler(), names, masters)


def test_names_follow_the_masters_into_later_groups_too() -> None:
    model, optimizer = wrapped()
    assert [optimizer.param_names[parameter] for parameter in optimizer.parameters] == ["weight", "bias"]
    assert not set(optimizer.param_names) & set(model.parameters())
    extra, wide = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    optimizer.param_names[extra] = "extra"
    optimizer.add_param_group({"params": [extra, wide], "lr": 9.0})
    master = optimizer.param_groups[1]["params"][0]
    assert (optimizer.param_names[master], optimizer.masters.pairs[master]) == ("extra", extra)
    assert optimizer.param_groups[1]["params"][1] is wide
    extra.grad, wide.grad = torch.ones(2).half(), torch.ones(2)
    optimizer.step()
    assert extra.tolist() == wide.tolist() == [-8.0, -8.0]


def test_clipped_gradients_stay_clipped_until_the_step() -> None:
    model, optimizer = wrapped()
    twin = copy.deepcopy(model).float()
    inputs = torch.arange(8.0).view(2, 4) / 8
    (twin(inputs) ** 2).sum().backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.25)
    optimizer.backward((model(inputs.half()) ** 2).sum())
    torch.testing.assert_close(optimizer.clip_grad_by_norm(0.25), expected, rtol=2e-3, atol=0)
    optimizer.clip_grad_by_value(0.1)
    optimizer.unscale_grad()
    for master, other in zip(optimizer.parameters, twin.parameters(), strict=True):
        torch.testing.assert_close(master.grad, other.grad.clamp(-0.1, 0.1), rtol=2e-3, atol=2e-4)
    for parameter in model.parameters():
        with pytest.raises(ConfigError, match=r"Found a read of \.grad"):
            _ = parameter.grad
    before = [master.detach().clone() for master in optimizer.parameters]
    grads = [master.grad.clone() for master in optimizer.parameters]
    optimizer.step()
    for old, grad, master, working in zip(before, grads, optimizer.parameters, model.parameters(), strict=True):
        assert torch.equal(master, old - 0.5 * grad)
        assert torch.equal(working, master.half())
    optimizer.zero_grad()
    assert all(master.grad is None for master in optimizer.parameters)


def test_a_closure_computes_the_gradients_of_a_step() -> None:
    found = []
    for by_closure in (True, False):
        model, optimizer = wrapped()

        def closure(model: nn.Module = model, optimizer: OptimizerWrapper = optimizer) -> torch.Tensor:
            loss = (model(torch.arange(8.0).view(2, 4).half() / 8) ** 2).sum()
            optimizer.backward(loss)
            return loss

        optimizer.step(closure) if by_closure else (closure(), optimizer.step())
        found.append([*model.parameters(), *optimizer.parameters])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# ------------------------------------------------------------------------------------------ casting


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain_norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("position", torch.ones(4))
        self.register_buffer("frequencies", torch.ones(4), persistent=False)
        self.register_buffer("counts", torch.ones(4, dtype=torch.int64))


def test_everything_is_cast_but_statistics_constants_and_integers() -> None:
    model = Parts()
    model.first.bias.grad = torch.ones(4)
    cast_model(model, torch.float16)
    wide = {name for name, value in [*model.named_parameters(), *model.named_buffers()] if value.dtype == torch.float32}
    assert wide == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "frequencies"}
    assert model.last.weight is model.first.weight
    assert model.first.bias.grad.dtype == torch.float16
    assert model.counts.dtype == torch.int64
    assert "frequencies" not in model.state_dict()
    assert len(list(castable_parameters(model))) == 5


def test_floats_are_cast_inside_of_containers() -> None:
    other = object()
    value = {"a": [torch.ones(1), (torch.ones(1, dtype=torch.int32), other)], "b": torch.ones(1, dtype=torch.float64)}
    result = cast_floats(value, torch.float16)
    assert result["a"][0].dtype == result["b"].dtype == torch.float16
    assert result["a"][1][0].dtype == torch.int32
    assert result["a"][1][1] is other
