# pyright: reportCallIssue=false, reportReturnType=false, reportArgumentType=false
"""Models that were built lazily, or from a checkpoint, and of which each rank only makes what it is going to have."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from divided import whole_parameters
from families import MODELS
from torch import nn

from colossal._src.booster.plugin import replica_sync as initial_values
from colossal._src.lazy.stored_tensor import StoredTensor
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.lazy import LazyInitContext, LazyTensor, lazy_tensors, materialize
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import fake_world, run_processes

pytestmark = pytest.mark.slow

FAMILIES = {"llama": 2, "llama-tied": 2, "llama-few-keys": 4, "gpt2": 2, "mixtral": 2, "t5": 2, "bert": 2, "falcon": 2}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_size": 2, "pp_size": 1}),
    "pp2": (2, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}),
    "tp2-pp2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
    "tp2-dp2": (4, {"tp_size": 2, "pp_size": 1, "zero_stage": 1}),
    "ep2": (2, {"tp_size": 1, "pp_size": 1, "ep_size": 2}),
    "tp2-ep4": (4, {"tp_size": 2, "pp_size": 1, "ep_size": 4}),
    "pp2-ep2": (4, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "ep_size": 2, "dp_outside": False}),
}
BOOSTED = ("llama-tied", "gpt2", "mixtral")


def make(name: str, num_layers: int = 2) -> nn.Module:
    kind, sizes = MODELS[name.removesuffix("-few-keys")]
    sizes = sizes | {key: num_layers for key in ("num_hidden_layers", "n_layer") if key in sizes}
    class_of: Any = getattr(transformers, kind)
    return class_of(class_of.config_class(**sizes))


def shards_of(model: nn.Module, size: int, rank: int, axis: str = "tp") -> nn.Module:
    with fake_world(size, rank):
        ShardFormer(ShardConfig(ParallelMesh(**{axis: size}))).optimize(model)
    return model


def check_same(found: nn.Module, expected: nn.Module) -> None:
    assert not list(lazy_tensors(found))
    pairs = [dict(each.named_parameters(remove_duplicate=False)) for each in (found, expected)]
    assert pairs[0].keys() == pairs[1].keys()
    for name, parameter in pairs[0].items():
        assert torch.equal(parameter, pairs[1][name]), name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
        assert parameter.requires_grad
    for (name, buffer), (_, other) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_random_values_are_those_of_one_process(name, monkeypatch) -> None:
    alive = watch_values(monkeypatch)
    for rank in range(size := FAMILIES[name]):
        torch.manual_seed(5)
        expected = shards_of(make(name), size, rank)
        torch.manual_seed(5)
        with LazyInitContext():
            lazy = make(name)
        check_same(shards_of(lazy, size, rank), expected)
    assert max(alive) == 1


def watch_values(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how many whole tensors that are divided exist at a time."""
    values, shard_values, counts, held = LazyTensor.values, LazyTensor.shard_values, [0], set[int]()

    def shard(self: LazyTensor, *args: Any) -> torch.Tensor:
        part = shard_values(self, *args)
        held.discard(id(self))
        assert not self._view.recipe.has_kept, "the whole stays"
        return part

    def whole(self: LazyTensor) -> torch.Tensor:
        held.add(id(self))
        counts.append(len(held))
        found = values(self)
        held.clear()
        return found

    monkeypatch.setattr(LazyTensor, "shard_values", shard)
    monkeypatch.setattr(LazyTensor, "values", whole)
    return counts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folders = {}
    for name in FAMILIES:
        torch.manual_seed(7)
        folders[name] = tmp_path_factory.mktemp(name)
        make(name).save_pretrained(folders[name])
    return folders


def load(name: str, folder: Path, **options: Any) -> nn.Module:
    return getattr(transformers, MODELS[name.removesuffix("-few-keys")][0]).from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as-stored", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_only_parts_are_read_from_files(name, dtype, saved, monkeypatch) -> None:
    read = watch_reads(monkeypatch)
    options = {} if dtype is None else {"dtype": dtype}
    for rank in range(size := FAMILIES[name]):
        expected = shards_of(load(name, saved[name], **options), size, rank)
        with LazyInitContext():
            lazy = load(name, saved[name], **options)
        read.clear()
        check_same(materialize(shards_of(lazy, size, rank)), expected)
        own = sum(each.numel() for each in lazy.parameters())
        names = len(list(lazy.named_parameters(remove_duplicate=False))) - len(list(lazy.parameters()))
        again = names * lazy.get_input_embeddings().weight.numel()  # what is tied is divided under each of its names
        assert own <= sum(read) <= own + again, "more than its part was read"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as-stored", "bf16"])
def test_only_experts_of_this_rank_are_read_from_files(dtype, saved, monkeypatch) -> None:
    """The files name each expert by itself, as those of the Hub do."""
    read = watch_reads(monkeypatch)
    options = {} if dtype is None else {"dtype": dtype}
    for rank in range(2):
        expected = shards_of(load("mixtral", saved["mixtral"], **options), 2, rank, "ep")
        with LazyInitContext():
            lazy = load("mixtral", saved["mixtral"], **options)
        read.clear()
        check_same(materialize(shards_of(lazy, 2, rank, "ep")), expected)
        assert sum(read) == sum(each.numel() for each in lazy.parameters())


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the elements that are read from files."""
    read: list[int] = []
    for method in ("__call__", "read", "read_region"):
        original = getattr(StoredTensor, method)

        def watched(self: StoredTensor, *args: Any, original: Any = original) -> torch.Tensor:
            found = original(self, *args)
            read.append(found.numel())
            return found

        monkeypatch.setattr(StoredTensor, method, watched)
    return read


# ------------------------------------------------------------------------------------------ by the plugin


def boosted_in(world: str) -> tuple[str, ...]:
    return ("mixtral",) if "ep_size" in WORLDS[world][1] else BOOSTED


def boost_all(folders: dict[str, Path], world: str) -> dict[str, Any]:
    """Boost models that each rank builds lazily, from random numbers of its own, and from files."""
    found = {}
    for name in boosted_in(world):
        for kind in ("random", "stored", "mixed"):
            found[name, kind] = boost(name, kind, folders[name], WORLDS[world][1])
    return found


def boost(name: str, kind: str, folder: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(11 + rank)
    if kind == "mixed" and rank == 1:
        model = make(name, num_layers=4)
    else:
        with LazyInitContext():
            model = load(name, folder) if kind == "stored" else make(name, num_layers=4)
    plugin = HybridParallelPlugin(precision="fp32", **options)
    optimizer = torch.optim.SGD(model.parameters())
    with mock.patch.object(initial_values, "materialize", wraps=materialize) as made_at_once:
        boosted, *_ = Booster(plugin=plugin).boost(model, optimizer)
    assert kind == "mixed" or not made_at_once.called, "all values were made, and sent"
    boosted.state_dict()
    return whole_parameters(boosted.unwrap(), plugin.mesh)


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_start_from_the_values_of_the_first(world, saved) -> None:
    size, options = WORLDS[world]
    ranks = run_processes(boost_all, size, saved, world)
    stage_ranks = size // options["pp_size"]
    for name in boosted_in(world):
        for kind in ("random", "stored", "mixed"):
            for rank, found in enumerate(each[name, kind] for each in ranks):
                torch.manual_seed(11 + rank // stage_ranks * stage_ranks)
                model = load(name, saved[name]) if kind == "stored" else make(name, num_layers=4)
                expected = dict(model.named_parameters(remove_duplicate=False))
                if name in {"llama-tied", "gpt2"}:
                    torch.manual_seed(11)
                    first = model if kind == "stored" else make(name, num_layers=4)
                    shared = first.get_input_embeddings().weight
                    expected |= {
                        key: shared for key in expected if expected[key] is model.get_input_embeddings().weight
                    }
                assert found
                for key, value in found.items():
                    assert torch.equal(value, expected[key]), (name, kind, rank, key)
            assert set().union(*(each[name, kind] for each in ranks)) == expected.keys()


# ------------------------------------------------------------------------------------------ memory

PROGRAM = """
import sys, torch
from pathlib import Path
from colossal.cluster import ParallelMesh
from colossal.lazy import LazyInitContext, materialize
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import fake_world
import transformers

def megabytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024

def divide():
    with LazyInitContext():
        if sys.argv[2] == "stored":
            model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
        else:
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(sys.argv[1]))
    with fake_world(4):
        ShardFormer(ShardConfig(ParallelMesh(tp=4))).optimize(model)
    return materialize(model)

divide()
Path("/proc/self/clear_refs").write_text("5")
before = megabytes("VmRSS")
model = divide()
print(megabytes("VmHWM") - before, sum(each.nbytes for each in model.parameters()) >> 20)
"""


@pytest.mark.parametrize("kind", ["stored", "random"])
def test_memory(kind, tmp_path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "vocab_size": 8192,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **sizes))
    size, largest = (math.ceil(each(p.nbytes for p in model.parameters()) / 2**20) for each in (sum, max))
    model.save_pretrained(tmp_path)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # or what is freed of less than 32 MB may stay
    command = [sys.executable, "-c", PROGRAM, tmp_path, kind]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    peak, own = map(int, run.stdout.split())
    assert own <= size // 4 + 1
    assert size > 300 > 6 * largest
    assert own - 10 < peak < own + largest + 10
