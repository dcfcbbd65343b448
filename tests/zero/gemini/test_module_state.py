# pyright: reportAttributeAccessIssue=false
"""What a model in chunks starts from, what it saves and loads, and what it refuses."""

import copy
from typing import Any

import pytest
import torch
from chunked import (
    BATCHES,
    EXACT,
    PLACEMENTS,
    ROWS,
    WIDTH,
    Branches,
    Deep,
    Outcome,
    assert_equal,
    draw,
    loss_of,
    model_of,
    own_rows,
    sgd,
    train_alone,
    train_chunked,
    wrap,
)
from torch import distributed as dist
from torch import nn

from colossal.errors import ConfigError, UnsupportedError
from colossal.lazy import LazyInitContext
from colossal.testing import fake_world, run_threads
from colossal.zero.gemini import GeminiDDP, get_static_torch_model


def states(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    wrapped, _ = wrap(model, None, **options)
    named = wrapped.state_dict(prefix="module.", only_rank_0=False)
    found = wrapped.state_dict(only_rank_0=False)
    assert list(named) == [f"module.{name}" for name in found]
    return [found, wrapped.state_dict()]


def states_by_size(model: nn.Module, mebibytes: float, only_rank_0: bool) -> list[tuple[dict[str, Any], int]]:
    wrapped, _ = wrap(model, None)
    return list(wrapped.state_dict_shard(max_shard_size=mebibytes, only_rank_0=only_rank_0))


@pytest.mark.parametrize("only_rank_0", [False, True])
def test_the_state_comes_some_of_it_at_a_time(only_rank_0: bool) -> None:
    model = model_of(Branches)
    expected = dict(model.state_dict())
    total = sum(value.nbytes for value in expected.values())
    limit = max(total // 3, *(value.nbytes for value in expected.values()))
    first, second = run_threads(states_by_size, 2, model, limit / 2**20, only_rank_0)
    assert len(first) == len(second) > 1
    for found in (first, second):
        assert all(0 < size <= limit for _, size in found)
        assert sum(size for _, size in found) == total
    assert any(shard for shard, _ in second) is not only_rank_0
    for found in (first, *([] if only_rank_0 else [second])):
        assert [sum(value.nbytes for value in shard.values()) for shard, _ in found] == [size for _, size in found]
        state = {name: value for shard, _ in found for name, value in shard.items()}
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_state_is_that_of_the_model(placement: str) -> None:
    model = model_of(Branches)
    expected = model.state_dict()
    for rank, (everywhere, first) in enumerate(run_threads(states, 3, model, **PLACEMENTS[placement])):
        assert list(everywhere) == list(expected)
        assert all(torch.equal(everywhere[name], value) for name, value in expected.items())
        assert list(first) == ([] if rank else list(expected))


def load(model: nn.Module, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    wrapped, optimizer = wrap(model, sgd, **options)
    loss_of(wrapped, own_rows(draw(8, ROWS, WIDTH))).backward()
    optimizer.zero_grad()
    found = wrapped.load_state_dict(state)
    assert not found.missing_keys
    assert not found.unexpected_keys
    for batch in BATCHES:
        optimizer.backward(loss_of(wrapped, own_rows(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


@pytest.mark.parametrize("placement", [*PLACEMENTS, "strict"])
def test_what_is_loaded_is_trained_on(placement: str) -> None:
    options: dict[str, Any] = PLACEMENTS.get(placement, {"strict_ddp_mode": True})
    trained = train_alone(model_of(Branches), [draw(7, ROWS, WIDTH)], make=sgd)["state"]
    model = model_of(Branches)
    model.load_state_dict(trained)
    expected = train_alone(model, make=sgd)["state"]
    for state in run_threads(load, 2, model_of(Branches), trained, **options):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, **EXACT, msg=name)


def test_what_does_not_fit_is_not_loaded() -> None:
    with fake_world(1):
        model, _ = wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), None)
        before = model.state_dict()
        state = {"0.weight": torch.zeros(3, 2), "0.bias": torch.zeros(2), "else": torch.zeros(1)}
        with pytest.raises(RuntimeError, match=r"missing: \['1.weight', '1.bias'\], unexpected: \['else'\].*0.weight"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match="0.weight"):
            model.load_state_dict(state, strict=False)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with pytest.raises(UnsupportedError, match="assign=True"):
            model.load_state_dict(before, assign=True)
        found = model.load_state_dict({"0.bias": torch.ones(2)}, strict=False)
        assert found.missing_keys == ["0.weight", "1.weight", "1.bias"]
        assert model.state_dict()["0.bias"].tolist() == [1, 1]


def plain_copies(model: nn.Module, dtype: torch.dtype) -> list[nn.Module | None]:
    wrapped, _ = wrap(model, None, mixed_precision=dtype)
    return [get_static_torch_model(wrapped, only_rank_0=only) for only in (True, False)]


def test_a_plain_model_comes_out_again() -> None:
    model = model_of(Branches).float()
    for rank, (first, own) in enumerate(run_threads(plain_copies, 2, model, torch.bfloat16)):
        assert (first is None) == bool(rank)
        assert own is not None
        assert own.tied.weight is own.same.weight
        assert [type(each) for each in own.parameters()] == [nn.Parameter] * 14
        assert [each.requires_grad for each in own.parameters()] == [each.requires_grad for each in model.parameters()]
        for name, value in model.state_dict().items():
            assert torch.equal(own.state_dict()[name], value.bfloat16().float()), name
        loss_of(own, BATCHES[0].float()).backward()
        assert own.embed.weight.grad is not None


# ------------------------------------------------------------------------------------------------- the start


def start_apart(models: list[nn.Module]) -> Outcome:
    return train_chunked(models[dist.get_rank()])


def test_all_ranks_start_from_the_first() -> None:
    first, second = model_of(Branches), model_of(Branches)
    for parameter in second.parameters():
        nn.init.constant_(parameter, 7.0)
    assert_equal(run_threads(start_apart, 2, [first, second]), train_alone(first))


def build_lazily(seed: int, lazily: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    if lazily:
        with LazyInitContext():
            model = Branches()
    else:
        model = Branches()
    wrapped = GeminiDDP(model, mixed_precision=None, chunk_config_dict={1: {"chunk_size": 60}})
    return wrapped.state_dict()


def test_a_model_that_is_built_lazily() -> None:
    with fake_world(1):
        eager, lazy = build_lazily(3, False), build_lazily(3, True)
    assert all(torch.equal(eager[name], value) for name, value in lazy.items())


def test_parameters_stay_the_objects_that_they_are() -> None:
    with fake_world(2):
        linear = nn.Linear(4, 4)
        weight = linear.weight
        model = GeminiDDP(linear, mixed_precision=torch.bfloat16)
        assert model.module.weight is weight
        assert (weight.shape, weight.dtype, weight.numel(), weight.dim()) == ((4, 4), torch.bfloat16, 16, 2)
        assert weight.is_leaf
        assert weight.requires_grad
        assert isinstance(weight, nn.Parameter)
        assert "whose values are in a chunk" in repr(weight)
        assert hash(weight) == hash(weight)
        assert dict.fromkeys([weight]) == {weight: None}


def test_reading_outside_of_passes_is_refused() -> None:
    with fake_world(2):
        model, _ = wrap(nn.Linear(4, 4).double(), None)
        weight = model.module.weight
        for read in (
            lambda: weight + 1,
            weight.sum,
            lambda: weight.data,
            weight.detach,
            lambda: weight[0],
            weight.tolist,
            lambda: torch.allclose(weight, weight),
            lambda: model.module(torch.ones(1, 4).double()),
            lambda: nn.init.ones_(weight),
            lambda: copy.deepcopy(model.module),
        ):
            with pytest.raises(UnsupportedError, match="Between passes the values of a parameter are sharded"):
                read()


def test_what_chunks_can_not_hold() -> None:
    with fake_world(2):
        model, _ = wrap(nn.Linear(4, 4), None)
        with pytest.raises(ConfigError, match=r"weight is in one already. Wrap or boost it once"):
            GeminiDDP(model.module)
        with pytest.raises(UnsupportedError, match=r"sparse=True in 0.*sparse=False"):
            GeminiDDP(nn.Sequential(nn.Embedding(3, 3, sparse=True)))
        with pytest.raises(ConfigError, match=r"weight: Parameter in torch.float32 on meta.*LazyInitContext"):
            GeminiDDP(nn.Linear(2, 2, device="meta"))
        integers = nn.Module()
        integers.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        with pytest.raises(ConfigError, match=r"count: Parameter in torch.int64"):
            GeminiDDP(integers)
        with pytest.raises(UnsupportedError, match=r"use_fp8=True.*mixed_precision=torch.bfloat16"):
            GeminiDDP(nn.Linear(2, 2), use_fp8=True)
        with pytest.raises(ConfigError, match=r"chunk_init_device='cuda'.*offload_param_frac=1.0"):
            GeminiDDP(nn.Linear(2, 2), chunk_init_device="cuda")
        with pytest.raises(ConfigError, match=r"Found device='cuda:0' for a rank on cpu. Leave it out"):
            GeminiDDP(nn.Linear(2, 2), device="cuda:0")
        with pytest.raises(ConfigError, match=r"for 2 ranks. Add an entry"):
            GeminiDDP(nn.Linear(2, 2), chunk_config_dict={4: {"chunk_size": 8}})
        with pytest.raises(ConfigError, match=r"for 2 ranks. Add an entry"):
            GeminiDDP(nn.Linear(2, 2), chunk_config_dict={2: {"size": 8}})


def test_a_model_without_parameters() -> None:
    with fake_world(2):
        model = GeminiDDP(nn.Tanh(), mixed_precision=None)
        assert model(torch.zeros(2)).tolist() == [0, 0]
        assert model.state_dict() == {}


def test_outputs_and_inputs_are_cast() -> None:
    with fake_world(1):
        options: dict[str, Any]
        for options, dtype in (
            ({}, torch.float16),
            ({"mixed_precision": torch.bfloat16}, torch.bfloat16),
            ({"mixed_precision": None}, torch.float64),
        ):
            model = GeminiDDP(nn.Linear(3, 2).double(), **options)
            assert model.module.weight.dtype == dtype
            assert model(torch.ones(1, 3, dtype=torch.float64)).dtype == (
                torch.float64 if dtype == torch.float64 else torch.float32
            )
        model = GeminiDDP(nn.Linear(3, 2).double(), mixed_precision=None, force_outputs_fp32=True)
        assert model(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float32


def optimizer_moves(model: nn.Module, scatter: bool) -> list[bool]:
    wrapped, _ = wrap(model, None, scatter_after_inference=scatter, chunk_numel=1000)
    with torch.no_grad():
        wrapped(BATCHES[0])
    return [chunk.full is None for chunk in wrapped.chunks.chunks]


@pytest.mark.parametrize("scatter", [True, False])
def test_chunks_after_inference(scatter: bool) -> None:
    for released in run_threads(optimizer_moves, 2, model_of(Deep), scatter):
        assert all(released) == scatter
