# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""What sharding must not change, and what it must say when it would."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossal.comm import CommCounter
from colossal.errors import ConfigError, UnsupportedError
from colossal.interface import OptimizerWrapper
from colossal.testing import WorldError, assert_close, assert_same_on_all_ranks, fake_world, run_processes

LIMIT = 0.1


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))


def data(rows: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 6).view(rows, 6).sin()


def own_rows(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.chunk(dist.get_world_size())[dist.get_rank()]


def boost(model: nn.Module, optimizer: Any = None, plugin: Any = None, **options: Any) -> Any:
    booster = Booster(device="cpu", plugin=plugin or TorchFSDPPlugin(**options))
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return ((model(inputs) - 1) ** 2).mean()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------------------ optimizers


def optimizers() -> dict[str, Any]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    kinds = {name: kind for name, kind in found.items() if isinstance(kind, type) and kind is not torch.optim.Optimizer}
    plain = {name: (kind, {"lr": 0.05}) for name, kind in kinds.items() if issubclass(kind, torch.optim.Optimizer)}
    return plain | {
        "SGD, Nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        "SGD, foreach": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": True}),
        "AdamW, AMSGrad": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True, "maximize": True}),
        "AdamW, fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
        "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.05, "foreach": True}),
        "RMSprop, centred": (torch.optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.5}),
    }


WRONG_ON_SHARDS = {"LBFGS", "Adafactor", "Muon", "Rprop", "SparseAdam"}


def step_by(names: list[str], sharded: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        kind, options = optimizers()[name]
        model = build().double()  # Adam turns the last bits of float32 sums, whose order is the backend's, into steps
        if sharded:
            _, boosted, optimizer = boost(model, kind(model.parameters(), **options))
        else:
            boosted, optimizer = model, OptimizerWrapper(kind(model.parameters(), **options))
        for _ in range(4):
            optimizer.backward(loss_of(boosted, own_rows(data()).double()))
            optimizer.step()
            optimizer.zero_grad()
        results[name] = values_of(model)
    return results


@pytest.mark.slow
def test_every_optimizer_of_torch_steps_as_in_one_process_or_is_refused() -> None:
    names = [name for name in optimizers() if name not in WRONG_ON_SHARDS]
    (alone,) = run_processes(step_by, 1, names, sharded=False)
    for ranks in (run_processes(step_by, size, names, sharded=True) for size in (1, 2, 4)):
        for results in ranks:
            for name in names:
                for key, expected in alone[name].items():
                    assert_close(results[name][key], expected, f"{name}: {key}")


@pytest.mark.parametrize("name", sorted(WRONG_ON_SHARDS))
def test_an_optimizer_that_looks_across_elements_is_refused(name) -> None:
    model = nn.Linear(4, 4, bias=False)
    kind = getattr(torch.optim, name)
    heir = type("Mine", (kind,), {})
    for each in (kind, heir):
        with (
            fake_world(2),
            pytest.raises(UnsupportedError, match=r"shards of the parameters here\. Found .* torch\.optim\.AdamW"),
        ):
            boost(model, each(model.parameters()))
        assert not hasattr(model.weight, "device_mesh")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_kernel_that_does_not_know_shards_is_refused(kind) -> None:
    model = build()
    with fake_world(2), pytest.raises(UnsupportedError, match=f"fused=True in {kind.__name__}.*pass foreach=True"):
        boost(model, kind(model.parameters(), lr=0.1, fused=True))


def go_on(plugin: bool) -> dict[str, torch.Tensor]:
    """Take a few steps in the open, then boost model and optimizer in the middle of the run."""
    model, inputs = build().double(), data().double()  # as in `step_by`
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    boosted = model
    if plugin:
        _, boosted, optimizer = boost(model, optimizer)
        state = optimizer.state[model[0].weight]
        assert state["exp_avg"].to_local().shape == model[0].weight.to_local().shape
    for _ in range(3):
        loss_of(boosted, own_rows(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def test_an_optimizer_with_state_goes_on() -> None:
    (alone,) = run_processes(go_on, 1, plugin=False)
    for found in run_processes(go_on, 4, plugin=True):
        for name, expected in alone.items():
            assert_close(found[name], expected, name)


def test_state_of_another_form_is_refused() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["row_sums"] = torch.ones(5)
    with fake_world(2), pytest.raises(UnsupportedError, match=r"Found 'row_sums' of shape \(5,\) for .* \(5, 6\)"):
        boost(model, optimizer)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * self.layer(x)


def test_groups_keep_their_order_and_hyperparameters() -> None:
    model = Scaled()
    optimizer = torch.optim.AdamW(
        [{"params": [model.layer.weight], "lr": 0.1}, {"params": [model.layer.bias, model.factor], "weight_decay": 0.0}]
    )
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    with fake_world(2):
        _, _, boosted = boost(model, optimizer)
    assert boosted.unwrap() is optimizer
    assert boosted.param_groups[0]["params"] == [model.layer.weight]
    assert [
        each is mine
        for each, mine in zip(boosted.param_groups[1]["params"], [model.layer.bias, model.factor], strict=True)
    ]
    assert [parameter.shape for parameter in boosted.parameters] == [(4, 4), (4,), ()]
    mixed = groups[1] | {"foreach": False}
    assert [{**group, "params": None} for group in optimizer.param_groups] == [groups[0], mixed]


@pytest.mark.parametrize("fast", ["fused", "foreach"])
def test_one_kernel_for_whole_and_sharded_parameters_is_refused(fast) -> None:
    model = Scaled()
    with (
        fake_world(2),
        pytest.raises(UnsupportedError, match=f"{fast}=True.*a group of their own, or leave {fast} out"),
    ):
        boost(model, torch.optim.AdamW(model.parameters(), **{fast: True}))
    own = [{"params": model.layer.parameters()}, {"params": [model.factor]}]
    with fake_world(2):
        boost(model, torch.optim.AdamW(own, **{fast: True}))


# ------------------------------------------------------------------------------------------ where the ranks start


def start_from(seeds: bool, sync: bool) -> Any:
    model = build(seed=dist.get_rank() if seeds else 0)
    model.register_buffer("mean", torch.full((2,), float(dist.get_rank() if seeds else 0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, data()).backward()
    optimizer.step()
    expected = values_of(build(seed=0))
    try:
        _, boosted, optimizer = boost(model, optimizer, sync_module_states=sync)
    except ConfigError as error:
        return str(error)
    for parameter in (*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())):
        assert_same_on_all_ranks(whole(parameter))
    assert model.mean.tolist() == [0.0, 0.0]
    for name, value in values_of(boosted.unwrap()).items():
        assert not torch.equal(value, expected[name])
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0.11)
    return None


def test_ranks_that_start_apart_are_told_so_on_all_of_them() -> None:
    for message in run_processes(start_from, 4, seeds=True, sync=False):
        assert "All ranks start from the same values" in message
        assert "differ: 0.weight, 0.bias, 2.weight, ..." in message
        assert "pass sync_module_states=True" in message


@pytest.mark.parametrize(("seeds", "sync"), [(False, False), (False, True), (True, True)])
def test_ranks_that_start_alike_or_are_made_to_start(seeds, sync) -> None:
    assert run_processes(start_from, 4, seeds=seeds, sync=sync) == [None] * 4


def start_apart_in(what: str) -> str:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, data()).backward()
    optimizer.step()
    if dist.get_rank() == 1:
        with torch.no_grad():
            if what == "one bit":
                model[4].bias[0] = torch.nextafter(model[4].bias[0], torch.tensor(9.0))
            elif what == "state":
                optimizer.state[model[0].weight]["momentum_buffer"][0, 0] += 1
            elif what == "shape":
                model.append(nn.Linear(1, 1))
            elif what == "buffer":
                model.register_buffer("extra", torch.ones(1))
    try:
        boost(model, optimizer)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("one bit", "Found 1 tensors that differ: 4.bias."),
        ("state", "Found 1 tensors that differ: momentum_buffer of 0.weight."),
        ("shape", "Build the same ones on all ranks"),
        ("buffer", "Build the same ones on all ranks"),
    ],
)
def test_a_small_difference_is_found(what, found) -> None:
    for message in run_processes(start_apart_in, 2, what):
        assert found in message


def test_checking_the_start_costs_a_few_bytes(monkeypatch) -> None:
    reduced, real = [], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        reduced.append(tensor.nbytes)
        return real(tensor, *args, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with fake_world(4), CommCounter() as counter:
        boost(build())
    assert reduced == [16, 16, 16]  # digests of what is boosted, of what is lazy in it, and of its values
    assert not counter.bytes  # no part of training


# ------------------------------------------------------------------------------------------ gradients


def clip(norm_type: float, world: bool) -> tuple[float, float, float]:
    model = nn.Sequential(build(), nn.Linear(1, 1))  # the last parameters are shorter than the world
    with torch.no_grad():
        for parameter in model[1].parameters():
            parameter.fill_(1.0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    boosted: nn.Module = model
    if world:
        _, boosted, optimizer = boost(model, optimizer)
        optimizer.backward(loss_of(boosted, own_rows(data())))
        with CommCounter() as counter:
            before = optimizer.get_grad_norm(norm_type)
        assert counter.calls == ({("all_reduce", "dp"): 1} if dist.get_world_size() > 1 else {})
        returned = optimizer.clip_grad_by_norm(LIMIT, norm_type)
        assert type(returned) is torch.Tensor
        assert returned.dtype == torch.float32
        return before, returned.item(), optimizer.get_grad_norm(norm_type)
    loss_of(model, data()).backward()
    before = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], norm_type).item()
    returned = nn.utils.clip_grad_norm_(model.parameters(), LIMIT, norm_type)
    return before, returned.item(), nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type).item()


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, float("inf")])
def test_norms_of_shards_are_norms_of_the_whole(norm_type) -> None:
    (alone,) = run_processes(clip, 1, norm_type, world=False)
    for size in (1, 2, 4):
        for found in run_processes(clip, size, norm_type, world=True):
            assert found == pytest.approx(alone, rel=1e-5)
    assert alone[0] > LIMIT


def overflow() -> list[str]:
    model = build()
    _, boosted, optimizer = boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.backward(loss_of(boosted, own_rows(data())))
    messages = []
    for norm_type in (0.0, -1.0, float("-inf")):
        try:
            optimizer.clip_grad_by_norm(1.0, norm_type)
        except UnsupportedError as error:
            messages.append(str(error))
    model[0].bias.grad.to_local().fill_(float("nan") if dist.get_rank() == 0 else 0.0)
    try:
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_norms_that_mean_nothing_are_errors_on_all_ranks() -> None:
    for *kinds, nonfinite in run_processes(overflow, 2):
        assert len(kinds) == 3
        assert all("Pass 1.0, 2.0 or float('inf')" in message for message in kinds)
        assert "non-finite" in nonfinite


def leave_unsynced() -> list[Any]:
    model = build()
    booster, boosted, optimizer = boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = own_rows(data())
    with booster.no_sync(boosted):
        booster.backward(loss_of(boosted, inputs), optimizer)
    with pytest.raises(ConfigError, match="Inside of no_sync, FSDP2 keeps full gradients"):
        _ = model[0].weight.grad
    try:
        optimizer.step()
        refused = ""
    except ConfigError as error:
        refused = str(error)
    optimizer.zero_grad()
    booster.backward(loss_of(boosted, inputs), optimizer)
    after_discard = whole(model[0].weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    return [refused, after_discard]


def test_gradients_from_no_sync_are_neither_forgotten_nor_kept() -> None:
    alone = build()
    loss_of(alone, data()).backward()
    for refused, after_discard in run_processes(leave_unsynced, 2):
        assert "accumulated inside of no_sync and not averaged since" in refused
        assert_close(after_discard, alone[0].weight.grad)


def nest() -> torch.Tensor:
    model = build()
    booster, boosted, optimizer = boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = own_rows(data())
    with booster.no_sync(boosted):
        with booster.no_sync(boosted):
            booster.backward(loss_of(boosted, inputs), optimizer)
        booster.backward(loss_of(boosted, inputs), optimizer)
    assert model[0].weight.grad is None
    booster.backward(loss_of(boosted, inputs), optimizer)
    return whole(model[0].weight.grad)


def test_no_sync_inside_of_no_sync_ends_with_the_outer_one() -> None:
    alone = build()
    (3 * loss_of(alone, data())).backward()
    for found in run_processes(nest, 2):
        assert_close(found, alone[0].weight.grad)


# ------------------------------------------------------------------------------------------ between the steps


def evaluate_between(strategy: str | None) -> list[float]:
    model = build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    boosted: nn.Module = model
    if strategy:
        _, boosted, optimizer = boost(model, optimizer, sharding_strategy=strategy)
    losses = []
    for _ in range(4):
        loss_of(boosted, own_rows(data())).backward()
        with torch.no_grad():
            losses.append(loss_of(boosted, data()).item())
        loss_of(boosted, own_rows(data()))  # a forward pass that nobody takes further
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(boosted, data()).item())
    return losses


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_no_forward_pass_sees_parameters_of_an_earlier_step(strategy) -> None:
    (alone,) = run_processes(evaluate_between, 1, None)
    for losses in run_processes(evaluate_between, 2, strategy):
        assert losses == pytest.approx(alone, rel=1e-5)
    assert len({round(loss, 6) for loss in alone}) == 5


def normalise(plugin: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    model[0].register_buffer("scratch", torch.tensor(float(dist.get_rank())), persistent=False)
    _, boosted, optimizer = boost(model, torch.optim.SGD(model.parameters(), lr=0.1), plugin)
    for _ in range(3):
        loss_of(boosted, own_rows(data())).backward()
        optimizer.step()
        optimizer.zero_grad()
    boosted.eval()
    with torch.no_grad():
        boosted(data())
    values = values_of(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert values.pop("0.scratch") == dist.get_rank() * isinstance(plugin, TorchFSDPPlugin)
    return values


def test_buffers_are_those_of_rank_0_as_under_ddp() -> None:
    expected = run_processes(normalise, 2, TorchDDPPlugin())[0]
    for values in run_processes(normalise, 2, TorchFSDPPlugin()):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert_close(value, expected[name], name)


def test_no_buffer_means_no_message() -> None:
    with fake_world(2):
        _, boosted, _ = boost(build())
        with CommCounter() as counter:
            boosted(data())
        assert not counter.calls
        _, boosted, _ = boost(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
        with CommCounter() as counter:
            boosted(data())
        assert counter.calls == {("broadcast", "dp"): 2}  # the means are floats, the count is not


# ------------------------------------------------------------------------------------------ models at the edges


class NoParameters(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def run_edges() -> list[Any]:
    _, nothing, _ = boost(NoParameters())
    frozen = build().requires_grad_(False)
    _, boosted, _ = boost(frozen)
    expected = build()(data())
    shapes = [tuple(parameter.to_local().shape) for parameter in frozen.parameters()]
    with torch.no_grad():
        torch.testing.assert_close(boosted(data()), expected)
    channels_last = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
    boost(channels_last, sync_module_states=True)
    return [nothing(torch.ones(1)).item(), shapes, tuple(channels_last.weight.to_local().shape)]


def test_models_without_trainable_parameters_and_with_strange_strides() -> None:
    first, second = run_processes(run_edges, 2)
    assert first == [2.0, [(3, 6), (3,), (2, 5), (1, 3), (1,)], (2, 2, 2, 2)]
    assert second == [2.0, [(2, 6), (2,), (1, 5), (0, 3), (0,)], (2, 2, 2, 2)]


def train_hybrid(strategy: str | None) -> list[Any]:
    model, inputs = build().double(), data().double()  # as in `step_by`
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    boosted: nn.Module = model
    norms = []
    if strategy:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        _, boosted, optimizer = boost(model, optimizer, process_group=mesh, sharding_strategy=strategy)
    else:
        optimizer = OptimizerWrapper(optimizer)
    for _ in range(4):
        optimizer.backward(loss_of(boosted, own_rows(inputs)))
        norms.append(optimizer.clip_grad_by_norm(LIMIT).item())
        optimizer.step()
        optimizer.zero_grad()
    return [norms, values_of(model)]


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_shards_inside_of_replicas_train_like_one_process(strategy) -> None:
    ((norms, values),) = run_processes(train_hybrid, 1, None)
    for found_norms, found in run_processes(train_hybrid, 4, strategy):
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, expected in values.items():
            assert_close(found[name], expected, name)


def test_a_training_can_be_repeated_bit_for_bit() -> None:
    first, second = (run_processes(train_hybrid, 4, "HYBRID_SHARD") for _ in range(2))
    for (norms, values), (same_norms, same_values) in zip(first, second, strict=True):
        assert norms == same_norms
        assert all(torch.equal(value, same_values[name]) for name, value in values.items())


def train_in_fp8(plugin: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16))
    booster = Booster(device="cpu", plugin=plugin, mixed_precision="fp8")
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.linspace(-1, 1, 4 * 32).view(4, 32) + dist.get_rank()
    for _ in range(3):
        booster.backward((boosted(inputs).float() ** 2).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def test_float8_is_the_same_under_ddp() -> None:
    expected = run_processes(train_in_fp8, 2, TorchDDPPlugin())[0]
    for values in run_processes(train_in_fp8, 2, TorchFSDPPlugin()):
        for name, value in values.items():
            assert_close(value, expected[name], name)


# ------------------------------------------------------------------------------------------ a rank that is lost


def lose_a_rank(folder: str) -> None:
    model = build()
    booster, boosted, optimizer = boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1000):
        if step == 2 and dist.get_rank() == 1:
            os._exit(3)
        try:
            booster.backward(loss_of(boosted, own_rows(data())), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:
            Path(folder, "error").write_text(f"{step} {error}")
            raise


@pytest.mark.slow
def test_a_lost_rank_is_an_error_and_no_hang(tmp_path) -> None:
    started = time.monotonic()
    with pytest.raises(WorldError, match="died with exit code 3"):
        run_processes(lose_a_rank, 2, str(tmp_path), timeout_seconds=50, fresh=True)
    assert time.monotonic() - started < 45
    assert (tmp_path / "error").read_text().startswith("2 ")
