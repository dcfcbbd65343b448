"""Where chunks are kept, how much room there is for those that are whole, and which words are refused."""

import itertools
from typing import Any

import pytest
import torch

from colossal._src.zero.gemini import ChunkPlacement, GeminiConfig
from colossal.errors import ConfigError
from colossal.zero.gemini import AccessTrace, AutoPlacement, DeviceMemory, MemoryTier, StaticPlacement

CPU = torch.device("cpu")
FRACTIONS = (0.0, 0.25, 0.5, 1.0)
SIZES = [10, 10, 10, 10]


@pytest.mark.parametrize(("parameters", "optimizer"), list(itertools.product(FRACTIONS, repeat=2)))
def test_shares_are_of_the_first_chunks(parameters: float, optimizer: float) -> None:
    if parameters > optimizer:
        with pytest.raises(ConfigError, match=f"offload_param_frac={parameters} and offload_optim_frac={optimizer}"):
            StaticPlacement(offload_optim_frac=optimizer, offload_param_frac=parameters)
        return
    placement = StaticPlacement(offload_optim_frac=optimizer, offload_param_frac=parameters)
    placements = placement.place_chunks(SIZES, DeviceMemory(CPU))
    assert [chunk_placement.parameters for chunk_placement in placements] == [
        MemoryTier.HOST if n < 4 * parameters else MemoryTier.DEVICE for n in range(4)
    ]
    assert [chunk_placement.optimizer for chunk_placement in placements] == [
        MemoryTier.HOST if n < 4 * optimizer else MemoryTier.DEVICE for n in range(4)
    ]
    assert not any(chunk_placement.is_full for chunk_placement in placements)


@pytest.mark.parametrize("share", FRACTIONS)
def test_the_rest_of_the_shared_part_stays_whole(share: float) -> None:
    placements = StaticPlacement(shard_param_frac=share).place_chunks(SIZES, DeviceMemory(CPU))
    assert [chunk_placement.is_full for chunk_placement in placements] == [n < 4 * (1 - share) for n in range(4)]


def test_room_of_the_static_policy() -> None:
    memory, trace = DeviceMemory(CPU, budget=10_000), AccessTrace()
    assert [StaticPlacement(num_ahead=n).full_chunk_budget(100, memory, trace) for n in (0, 1, 3)] == [200, 300, 500]
    assert not StaticPlacement().watches_activations


def test_room_of_the_auto_policy() -> None:
    placement, memory, trace = AutoPlacement(0.75), DeviceMemory(CPU, budget=10_000), AccessTrace()
    assert placement.watches_activations
    assert placement.full_chunk_budget(100, memory, trace) == 2500
    for chunk, peak in ((0, 500), (1, 3000), (2, 100), (1, 0)):
        trace.visit(chunk)
        trace.note_activations(peak)
    trace.begin()
    memory.add("gradients", 1000)
    memory.add("optimizer", 200)
    memory.add("parameters", 4000)
    expected = [3000, 3000, 3000, 100, 0]  # before the first use, and after each
    for at, chunk in enumerate((None, 0, 1, 2, 1)):
        if chunk is not None:
            trace.visit(chunk)
        assert placement.full_chunk_budget(100, memory, trace) == 10_000 - 1200 - expected[at]
    assert placement.full_chunk_budget(100, DeviceMemory(CPU), trace) == 200
    placements = placement.place_chunks(SIZES, memory)
    assert placements == [ChunkPlacement(MemoryTier.HOST, MemoryTier.HOST)] * 4
    assert placement.place_chunks(SIZES, DeviceMemory(CPU)) == [ChunkPlacement()] * 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"placement_policy": "gpu"}, r"Found 'gpu'.*'cuda' for everything on the device, 'cpu' for host memory"),
        ({"placement_policy": "cpu", "offload_optim_frac": 0.5}, "The policy 'cpu' sets the fractions itself"),
        ({"placement_policy": "cuda", "offload_optim_frac": 1.0}, "The policy 'cuda' sets the fractions itself"),
        ({"placement_policy": "const", "shard_param_frac": 0.5}, "pass placement_policy='static'"),
        ({"max_prefetch": -1}, r"Found -1. Pass 0 to gather none ahead"),
        ({"device_budget": 0}, r"Found 0. Leave it out for no limit"),
        ({"steady_cuda_cap_ratio": 0.0}, r"steady_cuda_cap_ratio.*the default is 0.9"),
        ({"steady_cuda_cap_ratio": 1.5}, "steady_cuda_cap_ratio"),
        ({"warmup_non_model_data_ratio": 1.5, "placement_policy": "auto"}, r"1.5. Pass a number from 0 to 1"),
        ({"shard_param_frac": -0.1}, "shard_param_frac is a fraction of the model. Found -0.1"),
        ({"offload_optim_frac": 2.0}, "offload_optim_frac is a fraction of the model. Found 2.0"),
        ({"offload_param_frac": 0.5}, "offload_optim_frac that is at least as large"),
        (
            {"offload_param_frac": 0.5, "offload_optim_frac": 0.5, "shard_param_frac": 0.5},
            "offloaded as shards.*Leave one of them out",
        ),
        ({"placement_policy": "auto", "offload_optim_frac": 0.5}, "pass placement_policy='static'"),
    ],
)
def test_words_that_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        GeminiConfig(**options)


def test_the_budget() -> None:
    assert GeminiConfig().budget_on(CPU) is None
    assert GeminiConfig(placement_policy="auto").budget_on(CPU) is None
    assert GeminiConfig(device_budget=77).budget_on(CPU) == 77
    assert GeminiConfig(pin_memory=True).budget_on(CPU) is None


@pytest.mark.parametrize("policy", ["cpu", "const"])
def test_policies_that_keep_everything_in_host_memory(policy: str) -> None:
    placement = GeminiConfig(placement_policy=policy, max_prefetch=2).placement
    assert placement == StaticPlacement(offload_optim_frac=1.0, offload_param_frac=1.0, num_ahead=2)
    assert placement.place_chunks(SIZES, DeviceMemory(CPU)) == [ChunkPlacement(MemoryTier.HOST, MemoryTier.HOST)] * 4
    whole = GeminiConfig(placement_policy=policy, strict_ddp_mode=True).placement
    assert (
        whole.place_chunks(SIZES, DeviceMemory(CPU))
        == [ChunkPlacement(MemoryTier.DEVICE, MemoryTier.HOST, is_full=True)] * 4
    )


def test_the_policy_that_keeps_everything_on_the_device() -> None:
    assert GeminiConfig(placement_policy="cuda").placement == GeminiConfig().placement == StaticPlacement()


def test_strict_mode_shares_nothing() -> None:
    assert GeminiConfig(strict_ddp_mode=True).placement == StaticPlacement(shard_param_frac=0.0)
    assert [
        chunk_placement.is_full
        for chunk_placement in StaticPlacement(shard_param_frac=0.0).place_chunks(SIZES, DeviceMemory(CPU))
    ] == [True] * 4
