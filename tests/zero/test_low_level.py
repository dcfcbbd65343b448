# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""ZeRO-1 and ZeRO-2 equal one process in float64, whatever the model, the buckets and the number of ranks."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal._src.comm import Partition
from colossal._src.zero import Partitions, ZeroConfig, ZeroShards, shard_optimizer
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.interface import OptimizerWrapper
from colossal.nn.optimizer import HybridAdam
from colossal.tensor import full_tensor_of, placement_of
from colossal.testing import WorldError, fake_world, run_threads

ROWS, WIDTH = 24, 6
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
STAGES = (1, 2)
AdamW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Branches(nn.Module):
    """A tie, a scalar, a frozen layer, a layer that nobody uses, and two experts of which each row takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 5)
        self.tied = nn.Linear(5, WIDTH, bias=False)
        self.tied.weight = nn.Parameter(self.embed.weight.detach().T.contiguous())
        self.same = nn.Linear(5, WIDTH, bias=False)
        self.same.weight = self.tied.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.idle = nn.Linear(3, 3)
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.embed(x)))
        chosen = x[:, 0] > 0
        for number, expert in enumerate(self.experts):
            rows = chosen if number else ~chosen
            if rows.any():
                hidden = hidden.index_add(0, rows.nonzero().flatten(), torch.tanh(expert(hidden[rows])))
        return (self.tied(hidden) + self.same(hidden)) * self.scale


def model_of(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build().double()


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) ** 2).mean()


def train_alone(model: nn.Module, make: Callable[..., Any], batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def boost(
    model: nn.Module, make: Callable[..., Any], size: int, replicas: int = 1, **options: Any
) -> tuple[Any, Any, Partition]:
    mesh = ParallelMesh(dp=size)
    partitions, model = Partitions(mesh, extra_dp_size=replicas), copy.deepcopy(model)
    return model, shard_optimizer(model, make(model.parameters()), partitions, ZeroConfig(**options)), partitions.over()


def own_rows(batch: torch.Tensor, size: int) -> torch.Tensor:
    return batch.chunk(size)[torch.distributed.get_rank()]


def train_shared(
    size: int,
    model: nn.Module,
    make: Callable[..., Any],
    batches: list[torch.Tensor],
    accumulate: int = 1,
    **options: Any,
) -> dict[str, torch.Tensor]:
    model, optimizer, _ = boost(model, make, size, **options)
    for batch in batches:
        optimizer.zero_grad()
        parts = own_rows(batch, size).chunk(accumulate)
        for number, part in enumerate(parts):
            waits = options.get("stage") == 1 and number < accumulate - 1
            with optimizer.masters.no_sync() if waits else nullcontext():
                optimizer.backward(loss_of(model, part) / accumulate)
        optimizer.step()
    optimizer.masters.wait()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(ranks: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    for reached in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(reached[name], value, **EXACT, msg=lambda text, n=name: f"{n}: {text}")


BATCHES = [draw(seed, ROWS, WIDTH) for seed in range(4)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bucket_numel", [1, 40, 10**6])
def test_branches_ties_and_idle_layers(size: int, stage: int, bucket_numel: int) -> None:
    """Half of the rows of one batch are sorted so that ranks take different experts."""
    model = model_of(Branches)
    batches = [batch[batch[:, 0].argsort()] for batch in BATCHES]
    expected = train_alone(model, AdamW, batches)
    ranks = run_threads(train_shared, size, size, model, AdamW, batches, stage=stage, bucket_numel=bucket_numel)
    assert_equal(ranks, expected)
    start = dict(model.named_parameters())
    assert torch.equal(expected["idle.weight"], start["idle.weight"]), "nobody used it, so nothing decays it"
    assert not torch.equal(expected["experts.0.weight"], start["experts.0.weight"])


MAKERS = {
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.02, amsgrad=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.02),
    "RAdam": partial(torch.optim.RAdam, lr=0.02),
    "Adamax": partial(torch.optim.Adamax, lr=0.02),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "HybridAdam": partial(HybridAdam, lr=0.02, weight_decay=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_that_work_by_element(name: str) -> None:
    model = model_of(Branches)
    ranks = run_threads(train_shared, 3, 3, model, MAKERS[name], BATCHES, stage=2, bucket_numel=50)
    assert_equal(ranks, train_alone(model, MAKERS[name], BATCHES))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", [{}, {"overlap_communication": False}, {"overlap_allgather": True}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation(stage: int, options: dict[str, Any], accumulate: int) -> None:
    model = model_of(Branches)
    ranks = run_threads(
        train_shared, 2, 2, model, AdamW, BATCHES, stage=stage, accumulate=accumulate, bucket_numel=40, **options
    )
    assert_equal(ranks, train_alone(model, AdamW, BATCHES))


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_of_the_shards(stage: int) -> None:
    model = model_of(Branches)
    ranks = run_threads(train_shared, 4, 4, model, AdamW, BATCHES, stage=stage, replicas=2)
    assert_equal(ranks, train_alone(model, AdamW, BATCHES))


@st.composite
def networks(draw_: Any) -> nn.Module:
    """Layers of random widths and kinds, some of them frozen or skipped by half of the rows."""
    widths = [WIDTH, *draw_(st.lists(st.integers(1, 9), min_size=1, max_size=4))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        linear = nn.Linear(before, after, bias=draw_(st.booleans()))
        linear.requires_grad_(draw_(st.integers(0, 4)) > 0)
        layers += [linear, nn.Tanh()]
        if draw_(st.booleans()):
            layers.append(nn.LayerNorm(after))
    layers.append(nn.Linear(widths[-1], 2))
    return nn.Sequential(*layers).double()


@settings(max_examples=25, deadline=None)
@given(
    networks(),
    st.integers(1, 4),
    st.sampled_from(STAGES),
    st.integers(1, 200),
    st.sampled_from([1, 2]),
)
def test_any_network_trains_as_in_one_process(
    model: nn.Module, size: int, stage: int, bucket_numel: int, accumulate: int
) -> None:
    make = partial(AdamW, eps=1e-3)  # or rounding errors of gradients that are truly 0 would be as large as a step
    ranks = run_threads(
        train_shared, size, size, model, make, BATCHES, stage=stage, bucket_numel=bucket_numel, accumulate=accumulate
    )
    assert_equal(ranks, train_alone(model, make, BATCHES))


# ------------------------------------------------------------------------------------------ what users do besides


def two_losses(size: int, model: nn.Module, stage: int, last_reduces: bool) -> list[torch.Tensor]:
    """Two backward passes in a step, of which the second one may not be reduced, and a step without zero_grad."""
    model, optimizer, _ = boost(model, AdamW, size, stage=stage, bucket_numel=30)
    rows = own_rows(BATCHES[0], size)
    for _ in range(2):
        optimizer.backward(loss_of(model, rows))
        with nullcontext() if last_reduces else optimizer.masters.no_sync():
            (3 * loss_of(model, rows.flip(1))).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("stage", "last_reduces"), [(1, True), (1, False), (2, True)])
def test_losses_one_after_the_other(stage: int, last_reduces: bool) -> None:
    model = model_of(Branches)
    alone = copy.deepcopy(model)
    optimizer = AdamW(alone.parameters())
    for _ in range(2):
        loss_of(alone, BATCHES[0]).backward()
        (3 * loss_of(alone, BATCHES[0].flip(1))).backward()
        optimizer.step()
    for reached in run_threads(two_losses, 3, 3, model, stage, last_reduces):
        for value, expected in zip(reached, alone.parameters(), strict=True):
            torch.testing.assert_close(value, expected.detach(), **EXACT)


def without_the_wrapper(size: int, model: nn.Module, stage: int) -> list[torch.Tensor]:
    """Backward passes of the loss itself, whose gradients pile up over the steps."""
    model, optimizer, _ = boost(model, AdamW, size, stage=stage, bucket_numel=30)
    for batch in BATCHES:
        loss_of(model, own_rows(batch, size)).backward()
        optimizer.get_grad_norm()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_plain_backward_passes_pile_up(stage: int) -> None:
    model = model_of(Branches)
    alone = copy.deepcopy(model)
    optimizer = AdamW(alone.parameters())
    for batch in BATCHES:
        loss_of(alone, batch).backward()
        optimizer.step()
    for reached in run_threads(without_the_wrapper, 3, 3, model, stage):
        for value, expected in zip(reached, alone.parameters(), strict=True):
            torch.testing.assert_close(value, expected.detach(), **EXACT)


class Recomputed(nn.Module):
    """One layer used twice by reentrant checkpoints, so that its gradient arrives twice in one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return x


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bucket_numel", [1, 10**6])
def test_gradients_that_arrive_twice(stage: int, bucket_numel: int) -> None:
    model = model_of(Recomputed)
    ranks = run_threads(train_shared, 2, 2, model, AdamW, BATCHES, stage=stage, bucket_numel=bucket_numel)
    assert_equal(ranks, train_alone(model, AdamW, BATCHES))


def only_one_rank_has_a_gradient(size: int, model: nn.Module, stage: int) -> list[torch.Tensor]:
    model, optimizer, partition = boost(model, AdamW, size, stage=stage)
    rows = BATCHES[0]
    loss = loss_of(model, rows) if partition.rank == 0 else torch.zeros((), requires_grad=True)
    optimizer.backward(loss)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_any_gradient(stage: int) -> None:
    model = model_of(Branches)
    alone = copy.deepcopy(model)
    optimizer = AdamW(alone.parameters())
    (loss_of(alone, BATCHES[0]) / 2).backward()
    optimizer.step()
    for reached in run_threads(only_one_rank_has_a_gradient, 2, 2, model, stage):
        for value, expected in zip(reached, alone.parameters(), strict=True):
            torch.testing.assert_close(value, expected.detach(), **EXACT)


def grow(size: int, model: nn.Module, added: nn.Module, stage: int) -> list[torch.Tensor]:
    """Add a layer to the optimizer after two steps, and thaw a frozen one."""
    model, added = copy.deepcopy(model), copy.deepcopy(added)
    both = nn.Sequential(model, added)
    mesh = ParallelMesh(dp=size)
    optimizer = shard_optimizer(both, AdamW(model.parameters()), Partitions(mesh), ZeroConfig(stage=stage))
    for step, batch in enumerate(BATCHES):
        if step == 2:
            optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.1})
        optimizer.zero_grad()
        optimizer.backward(loss_of(both, own_rows(batch, size)))
        optimizer.step()
    return [parameter.detach() for parameter in both.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_come_later(stage: int) -> None:
    model, added = model_of(Branches), model_of(lambda: nn.Linear(WIDTH, 3))
    both = nn.Sequential(copy.deepcopy(model), copy.deepcopy(added))
    optimizer = AdamW(both[0].parameters())
    for step, batch in enumerate(BATCHES):
        if step == 2:
            optimizer.add_param_group({"params": list(both[1].parameters()), "lr": 0.1})
        optimizer.zero_grad()
        both[1].zero_grad()
        loss_of(both, batch).backward()
        optimizer.step()
    for reached in run_threads(grow, 3, 3, model, added, stage):
        for value, expected in zip(reached, both.parameters(), strict=True):
            torch.testing.assert_close(value, expected.detach(), **EXACT)


def thaw(size: int, model: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    model, optimizer, _ = boost(model, AdamW, size, stage=stage)
    for step, batch in enumerate(BATCHES):
        model.frozen.requires_grad_(step >= 2)
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, own_rows(batch, size)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_layer_that_thaws(stage: int) -> None:
    model = model_of(Branches)
    alone = copy.deepcopy(model)
    optimizer = AdamW(alone.parameters())
    for step, batch in enumerate(BATCHES):
        alone.frozen.requires_grad_(step >= 2)
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    assert not torch.equal(expected["frozen.weight"], model.frozen.weight)
    assert_equal(run_threads(thaw, 2, 2, model, stage), expected)


def clip(size: int, model: nn.Module, stage: int) -> tuple[float, list[torch.Tensor]]:
    model, optimizer, _ = boost(model, AdamW, size, stage=stage, bucket_numel=40)
    optimizer.backward(100 * loss_of(model, own_rows(BATCHES[0], size)))
    norm = optimizer.clip_grad_by_norm(0.5).item()
    optimizer.clip_grad_by_value(0.1)
    return norm, [full_tensor_of(shard.grad) for shard in optimizer.parameters if shard.grad is not None]


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_sees_all_shards(stage: int) -> None:
    model = model_of(Branches)
    alone = copy.deepcopy(model)
    (100 * loss_of(alone, BATCHES[0])).backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item()
    nn.utils.clip_grad_value_(alone.parameters(), 0.1)
    for norm, grads in run_threads(clip, 3, 3, model, stage):
        assert norm == pytest.approx(wanted, rel=1e-9)
        expected = [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]
        for grad, value in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, value, **EXACT)


def resume_from_state(size: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """Share an optimizer that has state already."""
    model = copy.deepcopy(model)
    optimizer = AdamW(model.parameters())
    for batch in BATCHES[:2]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    wrapper = shard_optimizer(model, optimizer, Partitions(ParallelMesh(dp=size)), ZeroConfig())
    for batch in BATCHES[2:]:
        wrapper.zero_grad()
        wrapper.backward(loss_of(model, own_rows(batch, size)))
        wrapper.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_state_that_is_there_already_is_cut() -> None:
    model = model_of(Branches)
    assert_equal(run_threads(resume_from_state, 3, 3, model), train_alone(model, AdamW, BATCHES))


def fail_in_the_middle(size: int, model: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    """An error in a backward pass leaves nothing behind once gradients are thrown away."""
    model, optimizer, _ = boost(model, AdamW, size, stage=stage, bucket_numel=1)
    for batch in BATCHES:
        handle = model.embed.weight.register_hook(_raise)
        with pytest.raises(RuntimeError, match="no gradient today"):
            loss_of(model, own_rows(batch, size)).backward()
        handle.remove()
        optimizer.zero_grad()
        loss_of(model, own_rows(batch, size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _raise(_: torch.Tensor) -> None:
    raise RuntimeError("no gradient today")


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_a_backward_pass(stage: int) -> None:
    model = model_of(Branches)
    assert_equal(run_threads(fail_in_the_middle, 2, 2, model, stage), train_alone(model, AdamW, BATCHES))


# ------------------------------------------------------------------------------------------ memory, traffic, errors


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_are_equal_parts(stage: int, size: int) -> None:
    model = model_of(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))
    total = sum(parameter.numel() for parameter in model.parameters())

    def program() -> tuple[int, int, int]:
        own, optimizer, _ = boost(model, AdamW, size, stage=stage, bucket_numel=5000)
        optimizer.backward(loss_of(own, draw(0, 2, 64)))
        optimizer.step()
        held = sum(shard.numel() for shard in optimizer.parameters)
        states = sum(entry["exp_avg"].numel() for entry in optimizer.state.values())
        return held, states, sum(shard.grad.numel() for shard in optimizer.parameters)

    for counts in run_threads(program, size):
        for count in counts:
            assert abs(count - total / size) <= 64 * size


@pytest.mark.parametrize("stage", STAGES)
def test_traffic_of_a_step(stage: int) -> None:
    size, numel = 4, sum(parameter.numel() for parameter in Branches().parameters() if parameter.requires_grad)
    count = len(list(Branches().parameters()))
    with fake_world(size), CommCounter() as counter:
        model, optimizer, partition = boost(model_of(Branches), AdamW, size, stage=stage, bucket_numel=10**6)
        optimizer.backward(loss_of(model, BATCHES[0]))
        optimizer.step()
    padded = -(-numel // size) * size * 8
    assert counter.bytes["reduce_scatter", "dp"] == padded * (size - 1) // size
    assert counter.bytes["all_gather", "dp"] == padded * (size - 1) // size
    agreed = count + len(optimizer.masters.buckets)
    assert counter.bytes["all_reduce", "dp"] == 2 * agreed * 4 * (size - 1) // size
    assert partition.world_size == size


def test_shards_know_their_parameters() -> None:
    with fake_world(3, rank=1):
        model, optimizer, _ = boost(model_of(Branches), AdamW, 3)
        masters = optimizer.masters
        assert isinstance(masters, ZeroShards)
        assert isinstance(optimizer, OptimizerWrapper)
        for shard, working in masters.pairs.items():
            assert placement_of(shard).shape == working.shape
            assert optimizer.param_names[shard] in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (torch.optim.LBFGS, r"Found LBFGS, which cannot be tried.*closure"),
        (torch.optim.Adafactor, r"Found Adafactor, whose update.*differed by.*DistributedAdaFactor"),
        (torch.optim.SparseAdam, r"Found SparseAdam, which cannot be tried.*dense gradients"),
    ],
)
def test_optimizers_that_see_more_than_elements(optimizer: Callable[..., Any], match: str) -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match=match):
        boost(model_of(Branches), optimizer, 2)


def test_sparse_gradients_are_refused() -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match="sparse=False"):
        boost(nn.Embedding(3, 2, sparse=True), AdamW, 2)


def test_parameters_without_values_are_refused() -> None:
    with pytest.raises(WorldError, match="weight: .* on meta"):
        run_threads(lambda: boost(nn.Linear(2, 2, device="meta"), AdamW, 2), 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stage": 3}, "Pass 1 or 2"),
        ({"bucket_numel": 0}, "at least one"),
        ({"communication_dtype": torch.int8}, "int8"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ZeroConfig(**options)


def test_blocks_divide_the_axis() -> None:
    with fake_world(4), pytest.raises(MeshError, match="Pass a divisor"):
        ParallelMesh(dp=4).blocks("dp", 3)


def test_a_state_dict_of_shards_is_copied_and_saved(tmp_path: Path) -> None:
    """The processes that share a tensor are neither copied nor written."""
    with fake_world(2):
        model, optimizer, _ = boost(model_of(Branches), HybridAdam, 2)
        optimizer.backward(loss_of(model, BATCHES[0]))
        optimizer.step()
        copied = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(UnsupportedError, match=r"booster\.save_optimizer"):
            torch.save(copied, tmp_path / "state.pt")
        torch.save(dict(copied["state"]), tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=False)
    assert torch.equal(read[0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2}, {"overlap_allgather": True}])
def test_nothing_holds_a_model_that_is_forgotten(options: dict[str, Any]) -> None:
    with fake_world(2):
        model, optimizer, partition = boost(model_of(Branches), HybridAdam, 2, **options)
        optimizer.backward(loss_of(model, BATCHES[0]))
        optimizer.step()
        held = [weakref.ref(each) for each in (model, model.scale, optimizer.masters, *optimizer.masters.buckets)]
        del model, optimizer, partition
        gc.collect()
        assert [each() for each in held] == [None] * len(held)


def live_tensors() -> list[torch.Tensor]:
    # not by isinstance, which a proxy of another library may answer
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_leaves_no_tensor_to_the_garbage_collector(stage: int, dtype: torch.dtype) -> None:
    """A gradient shard in a reference cycle would stay until a collection, which may not come for many steps."""
    with fake_world(2):
        model, optimizer, _ = boost(model_of(Branches).to(dtype), HybridAdam, 2, stage=stage)

        def step() -> None:
            optimizer.backward(loss_of(model, BATCHES[0].to(dtype)))
            optimizer.step()
            optimizer.zero_grad()

        step()  # makes the states; torch's modules that it imports leave frames in cycles, with what these hold
        gc.collect()
        gc.disable()
        try:
            step()
            after_two = len(live_tensors())
            step()
            after_three = len(live_tensors())
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            collected = [tuple(each.shape) for each in gc.garbage if issubclass(type(each), torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert after_three == after_two
        assert collected == []
