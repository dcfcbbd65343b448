"""ZeRO and Gemini by their older names: each trains as one process does."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy.zero import (
    BucketTensorShardStrategy,
    ChunkManager,
    GeminiManager,
    LowLevelZeroOptimizer,
    MemStatsCollector,
    ShardedModelV2,
    ShardedOptimizerV2,
    StatefulTensorMgr,
    TensorShardStrategy,
    ZeroDDP,
    ZeroInitContext,
    ZeroOptimizer,
    convert_to_zero_v2,
    init_chunk_manager,
    search_configuration_of_chunks,
)
from colossal.nn.optimizer import HybridAdam
from colossal.testing import fake_world, run_threads
from colossal.zero import zero_model_wrapper, zero_optim_wrapper
from colossal.zero.gemini import GeminiDDP

STEPS, RANKS = 3, 2
Pair = tuple[Any, Any]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()  # so that rounding makes no steps


MODEL = make_model()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (4,), generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return HybridAdam(model.parameters(), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(model: Any, optimizer: Any) -> list[float]:
    """Take steps on this rank's share of each batch; the losses of all ranks are averaged."""
    losses = []
    for step in range(STEPS):
        inputs, labels = (each.chunk(RANKS)[dist.get_rank()] for each in batch_of(step))
        loss = nn.functional.cross_entropy(model(inputs).double(), labels)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reference(make: Callable[[nn.Module], Any] = adam) -> tuple[list[float], list[torch.Tensor]]:
    model, losses = make_model(), []
    optimizer = make(model)
    for step in range(STEPS):
        inputs, labels = batch_of(step)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def by_manager(policy: str) -> Pair:
    model = deepcopy(MODEL)
    manager = init_chunk_manager(model, GeminiManager.get_default_device(policy), 8, 0.001, 0)
    wrapped = ZeroDDP(model, GeminiManager(policy, manager), mixed_precision=None)
    return wrapped, ZeroOptimizer(adam(wrapped), wrapped)


def by_chunk_size() -> Pair:
    model = deepcopy(MODEL)
    size = ChunkManager.search_chunk_size(model, 64, 4)
    chunks = ChunkManager(size, dist.group.WORLD, enable_distributed_storage=True, init_device="cpu")
    wrapped = ZeroDDP(model, GeminiManager("cuda", chunks), mixed_precision=None)
    return wrapped, ZeroOptimizer(adam(wrapped), wrapped)


def by_replicas() -> Pair:
    wrapped = ZeroDDP(
        deepcopy(MODEL), GeminiManager("static", ChunkManager(64, None, False)), mixed_precision=None, pin_memory=True
    )
    return wrapped, ZeroOptimizer(adam(wrapped), wrapped)


def low_level(**options: Any) -> Pair:
    model = deepcopy(MODEL)
    return model, LowLevelZeroOptimizer(adam(model), **options)


def nvme_page() -> Pair:
    config = {"strict_ddp_mode": True, "device": "cpu", "placement_policy": "cpu", "pin_memory": True, "hidden_dim": 8}
    model = deepcopy(MODEL)
    optimizer = adam(model)
    model = zero_model_wrapper(model, zero_stage=3, gemini_config=config | {"mixed_precision": None})
    return model, zero_optim_wrapper(model, optimizer, initial_scale=2**5)


WAYS: dict[str, Callable[[], Pair]] = {
    "managers, on the device": lambda: by_manager("cuda"),
    "managers, on the host": lambda: by_manager("cpu"),
    "managers, auto": lambda: by_manager("auto"),
    "a chunk size": by_chunk_size,
    "a chunk size, not sharded": by_replicas,
    "low level, stage 1": low_level,
    "low level, stage 2": lambda: low_level(partition_grad=True, overlap_communication=True),
    "low level, one group": lambda: low_level(dp_process_group=dist.group.WORLD, cpu_offload=True),
    "the wrappers of the page on NVMe": nvme_page,
}


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_one_process(way: str) -> None:
    def program() -> tuple[list[float], list[torch.Tensor]]:
        model, optimizer = WAYS[way]()
        losses = train(model, optimizer)
        if isinstance(model, GeminiDDP):
            return losses, list(model.state_dict(only_rank_0=False).values())
        return losses, [parameter.detach().clone() for parameter in model.parameters()]

    (first, parameters), (second, others) = run_threads(program, RANKS)
    losses, expected = reference()
    torch.testing.assert_close([(a + b) / 2 for a, b in zip(first, second, strict=True)], losses)
    for one, other, value in zip(parameters, others, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, value)
    assert any(not torch.equal(one, value) for one, value in zip(parameters, MODEL.parameters(), strict=True))


def test_gradients_accumulate_without_reduction_under_stage_1() -> None:
    def program() -> list[torch.Tensor]:
        model, optimizer = low_level(clip_grad_norm=0.5)
        for step in range(STEPS):
            inputs, labels = (each.chunk(RANKS)[dist.get_rank()] for each in batch_of(step))
            with optimizer.no_sync():
                optimizer.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.backward(nn.functional.cross_entropy(model(-inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model = make_model()
    optimizer = adam(model)
    for step in range(STEPS):
        inputs, labels = batch_of(step)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.functional.cross_entropy(model(-inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for parameters in run_threads(program, RANKS):
        for one, value in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(one, value.detach())


@pytest.mark.parametrize("partition_grad", [False, True])
def test_a_low_level_optimizer_shows_whole_gradients_and_states(partition_grad: bool) -> None:
    def program() -> tuple[list[Any], dict[str, Any], list[torch.Tensor]]:
        model, optimizer = low_level(partition_grad=partition_grad)
        inputs, labels = (each.chunk(RANKS)[dist.get_rank()] for each in batch_of(0))
        optimizer.backward(nn.functional.cross_entropy(model(inputs), labels))
        grads = [optimizer.get_param_grad(each) for each in model.parameters()]
        shards = optimizer.get_working_to_master_map()
        for each in model.parameters():
            (own,) = optimizer.get_partitioned_gradients_by_param_id(0, id(each))
            assert own.shape == shards[id(each)].shape
            assert optimizer.get_master_to_working_map()[id(shards[id(each)])] is each
        optimizer.step()
        state = deepcopy(optimizer.state_dict())
        with pytest.raises(ConfigError, match="none of them"):
            optimizer.get_param_grad(nn.Parameter(torch.ones(1)))
        again, other = low_level(partition_grad=partition_grad)
        again.load_state_dict(model.state_dict())
        other.load_state_dict(deepcopy(state))
        for trained, by in ((model, optimizer), (again, other)):
            by.zero_grad()
            by.backward(nn.functional.cross_entropy(trained(inputs), labels))
            by.step()
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        return grads, state, [each.detach() for each in model.parameters()]

    model = make_model()
    optimizer = adam(model)
    nn.functional.cross_entropy(model(batch_of(0)[0]), batch_of(0)[1]).backward()
    expected = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    optimizer.step()
    whole = deepcopy(optimizer.state_dict())["state"]
    for grads, state, _ in run_threads(program, RANKS):
        for grad, value in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, value)
        assert state["state"].keys() == whole.keys()
        for number, entry in whole.items():
            for name, value in entry.items():
                torch.testing.assert_close(state["state"][number][name], value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_level_optimizer_casts_and_keeps_master_weights(dtype: torch.dtype) -> None:
    def program() -> tuple[torch.dtype, torch.dtype, float]:
        model, optimizer = low_level(forced_dtype=dtype, initial_scale=64.0)
        inputs, labels = batch_of(0)
        optimizer.backward(nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels))
        optimizer.step()
        return next(model.parameters()).dtype, optimizer.parameters[0].dtype, optimizer.scaler.scale_value

    scale = 64.0 if dtype == torch.float16 else 1.0
    assert run_threads(program, RANKS) == [(dtype, torch.float32, scale)] * RANKS


# ------------------------------------------------------------------------------------------ config files


@pytest.mark.parametrize("strategy", [None, TensorShardStrategy(), BucketTensorShardStrategy()])
def test_a_sharded_model_of_a_config_file_computes_in_half_precision(strategy: Any) -> None:
    def program() -> tuple[list[float], list[torch.Tensor]]:
        model_config = {"shard_strategy": strategy, "tensor_placement_policy": "cpu", "reuse_fp16_shard": True}
        model = deepcopy(MODEL)
        model, optimizer = convert_to_zero_v2(model, sgd(model), model_config, {"initial_scale": 2**5})
        assert optimizer.scaler.scale_value == 2**5
        return train(model, optimizer), list(model.state_dict(only_rank_0=False).values())

    (first, parameters), (second, _) = run_threads(program, RANKS)
    losses, expected = reference(sgd)
    averages = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(averages, losses, atol=2e-2, rtol=0)
    for one, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one.double(), value, atol=2e-2, rtol=0)


def test_a_model_of_a_zero_context_takes_no_memory_until_it_is_sharded() -> None:
    with fake_world(2):
        with ZeroInitContext(target_device="cpu", shard_strategy=TensorShardStrategy(), shard_param=True):
            model = nn.Linear(8, 8)
        assert type(model.weight).__name__ == "LazyTensor"
        wrapped = ShardedModelV2(model)
        optimizer = ShardedOptimizerV2(wrapped, adam(wrapped))
    assert optimizer.scaler.scale_value == 2.0**32


def test_strategies_differ_in_their_chunks() -> None:
    with fake_world(2):
        apart, together = (
            ShardedModelV2(make_model(), each) for each in (TensorShardStrategy(), BucketTensorShardStrategy())
        )
    assert len(apart.chunks.chunks) > len(together.chunks.chunks)


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "options",
    [
        {"fp32_reduce_scatter": True},
        {"reduce_scatter_bucket_size_mb": 50},
        {"gradient_predivide_factor": 2.0},
    ],
)
def test_refuses_what_chunks_cannot_do(options: dict[str, Any]) -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match=next(iter(options))):
        ShardedModelV2(make_model(), **options)


def test_refuses_options_that_nothing_reads() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="shard_strategi"):
        convert_to_zero_v2(model, adam(model), {"shard_strategi": TensorShardStrategy()})
    with pytest.raises(ConfigError, match="lr"):
        convert_to_zero_v2(model, adam(model), None, {"lr": 1})
    with pytest.raises(ConfigError, match="TensorShardStrategy"):
        ShardedModelV2(model, "tensor")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="default_dtype"):
        ZeroInitContext(default_dtype=torch.float16)


@pytest.mark.parametrize("options", [{"overlap_allgather": True}, {"backward_context": object()}])
def test_a_low_level_optimizer_refuses_what_takes_the_model(options: dict[str, Any]) -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match="LowLevelZeroPlugin"):
        low_level(**options)


def test_a_low_level_optimizer_takes_one_group_of_all_parameters() -> None:
    def program() -> list[int]:
        model = deepcopy(MODEL)
        world: Any = dist.group.WORLD
        optimizer = LowLevelZeroOptimizer(adam(model), {world: list(model.parameters())})
        with pytest.raises(UnsupportedError, match="one group"):
            LowLevelZeroOptimizer(adam(other := deepcopy(MODEL)), {world: list(other.parameters())[:1]})
        with pytest.raises(ConfigError, match="Leave one out"):
            LowLevelZeroOptimizer(adam(deepcopy(MODEL)), {world: []}, dp_process_group=world)
        return [parameter.numel() for parameter in optimizer.parameters]

    sizes = run_threads(program, RANKS)
    assert sum(map(sum, sizes)) >= sum(parameter.numel() for parameter in MODEL.parameters())


@pytest.mark.parametrize(("part", "instead"), [(StatefulTensorMgr, "TensorState"), (MemStatsCollector, "AccessTrace")])
def test_a_part_without_counterpart_says_what_to_use(part: Any, instead: str) -> None:
    with pytest.raises(UnsupportedError, match=instead):
        part("cuda")


def test_chunks_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least one element"):
        ChunkManager(0)
    with pytest.raises(ConfigError, match="init_device"):
        ChunkManager(8, init_device="meta")
    assert ChunkManager(8).configuration == {1: {"chunk_size": 8, "keep_gathered": False}}
    assert GeminiManager.get_default_device("const") == torch.device("cpu")


def test_sizes_of_chunks_are_searched_by_older_and_newer_names() -> None:
    model = nn.Linear(100, 100)
    older = search_configuration_of_chunks(model, search_range_mb=1, search_interval_byte=100, min_chunk_size_mb=0)
    newer = search_configuration_of_chunks(model, search_range_m=1, search_interval=100, min_chunk_size_m=0)
    assert older == newer
    options = {"search_range_m": 1, "min_chunk_size_m": 0, "strict_ddp_flag": True}
    settings = init_chunk_manager(model, hidden_dim=100, reuse_fp16_chunk=True, max_prefetch=2, **options)
    assert settings.max_prefetch == 2
    assert settings.dp_degree_chunk_size_dict == {1: settings.configuration[1]["chunk_size"]}
    assert settings.configuration[1]["keep_gathered"]
