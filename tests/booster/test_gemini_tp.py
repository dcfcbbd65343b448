# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""`GeminiPlugin(tp_size=...)`: models of Hugging Face that are sharded over tp before they are put into chunks.

That each step is one of one process is shown by the equality matrix for Llama; here are GPT-2, whose projections are
packed, checkpoints, lazily built models, adapters, and what is refused.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build, inputs_of
from float64 import KeepFloat64
from torch import nn

from colossal import nn as parallel
from colossal._src.tensor import backing_shard, copy_placement
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, MeshError, PlanError, UnsupportedError
from colossal.lazy import LazyInitContext, lazy_tensors
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.tensor import full_tensor_of
from colossal.testing import fake_world, run_processes, run_threads
from colossal.zero.gemini import GeminiDDP, GeminiOptimizer

STEPS, BEFORE = 3, 1
CHUNKS = {size: {"chunk_size": 5000} for size in (1, 2, 4)}
WORLDS = {"tp2": 2, "dp2 x tp2": 4}

pytestmark = [pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"), pytest.mark.slow]


def gemini(tp_size: int = 2, **options: Any) -> GeminiPlugin:
    return GeminiPlugin(**({"precision": "fp32", "tp_size": tp_size, "chunk_config_dict": CHUNKS} | options))


MODELS = {family: build(family) for family in ("gpt2", "llama", "llama-tied")}
"""Built once: ranks that are threads cannot draw the same numbers."""


def model_of(family: str) -> nn.Module:
    return copy.deepcopy(MODELS[family])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, eps=1e-3)


def batch_of(family: str, step: int, place: tuple[int, int]) -> dict[str, torch.Tensor]:
    inputs = [inputs_of(family, num_changed=step + 3 * number) for number in range(2)]
    whole = {key: torch.cat([each[key] for each in inputs]) for key in inputs[0]}
    return {key: value.chunk(place[1])[place[0]] for key, value in whole.items()}


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: full_tensor_of(backing_shard(parameter)).detach().clone()
        for name, parameter in model.unwrap().named_parameters()
    }


def whole_grads(optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        optimizer.param_names[each]: full_tensor_of(copy_placement(each.grad.detach(), each)).clone()
        for each in optimizer.parameters
    }


def train(booster: Booster, boosted: tuple[Any, ...], family: str, first: int, last: int) -> dict[str, Any]:
    """Losses, norms and gradients of some steps, and the parameters afterwards."""
    model, optimizer, *_ = boosted
    losses, norms, grads = [], [], {}
    for step in range(first, last):
        loss = model(**batch_of(family, step, booster.plugin.data_parallel_rank_and_size())).loss
        booster.backward(loss, optimizer)
        norms.append(optimizer.get_grad_norm())
        grads |= {f"{name} in step {step}": grad for name, grad in whole_grads(optimizer).items()}
        if not isinstance(booster.plugin, GeminiPlugin):
            optimizer.clip_grad_by_norm(0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "grads": grads, "state": whole_state(model)}


def boost(plugin: Any, model: nn.Module) -> tuple[Booster, tuple[Any, ...]]:
    booster = Booster(device="cpu", plugin=plugin)
    return booster, booster.boost(model, adamw(model))


def run(family: str, tp_size: int | None, **options: Any) -> dict[str, Any]:
    with KeepFloat64():
        plugin = None if tp_size is None else gemini(tp_size, max_norm=0.05, **options)
        booster, boosted = boost(plugin, model_of(family))
        return train(booster, boosted, family, 0, STEPS)


@cache
def alone(family: str) -> dict[str, Any]:
    return run_threads(run, 1, family, None)[0]


def compare(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    losses = torch.tensor([rank["losses"] for rank in ranks], dtype=torch.float64).mean(0)
    assert_equal(losses, torch.tensor(expected["losses"], dtype=torch.float64), "losses")
    for rank in ranks:
        norms = (torch.tensor(each["norms"], dtype=torch.float64) for each in (rank, expected))
        assert_equal(*norms, "norms")
        for what in ("grads", "state"):
            assert rank[what].keys() == expected[what].keys()
            for name, value in expected[what].items():
                assert_equal(rank[what][name], value, f"{what} of {name}")
                assert torch.equal(rank[what][name], ranks[0][what][name]), f"{what} of {name} differs between ranks"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("options", [{}, {"enable_sequence_parallelism": True}, {"enable_flash_attention": True}])
def test_packed_projections_train_like_in_one_process(options: dict[str, Any], world: str) -> None:
    ranks = run_threads(lambda: run("gpt2", 2, **options), WORLDS[world])
    compare(ranks, alone("gpt2"))
    start = dict(MODELS["gpt2"].named_parameters())
    assert all(not torch.equal(value, start[name]) for name, value in ranks[0]["state"].items())


# ------------------------------------------------------------------------------------------ the options do something


def look(**options: Any) -> tuple[str, bool, tuple[int, ...], int]:
    """The kind of attention, whether activations are compiled, the shape of a weight, and the data-parallel ranks."""
    model = build("gpt2", attention="eager")
    booster, (model, *_) = boost(gemini(**options), model)
    inner = model.unwrap()
    block = inner.transformer.h[0]
    is_compiled = block.mlp.act._compiled_call_impl is not None
    shape = tuple(block.mlp.c_fc.weight.shape)
    return inner.config._attn_implementation, is_compiled, shape, booster.plugin.mesh.size("dp")


def test_the_options_reach_the_model() -> None:
    with fake_world(4):
        assert look() == ("eager", False, (64, 128), 2)
        assert look(enable_flash_attention=True) == ("sdpa", False, (64, 128), 2)
        assert look(enable_jit_fused=True) == ("eager", True, (64, 128), 2)
        assert look(enable_all_optimization=True) == ("sdpa", True, (64, 128), 2)
        assert look(tp_size=1, enable_jit_fused=True, enable_fused_normalization=True) == ("eager", True, (64, 256), 4)


def train_compiled() -> list[float]:
    booster, boosted = boost(gemini(enable_all_optimization=True, max_norm=0.05), model_of("gpt2"))
    return train(booster, boosted, "gpt2", 0, STEPS)["losses"]


def test_compiled_activations_read_chunks() -> None:
    for losses in run_processes(train_compiled, 2, fresh=True):
        assert losses == pytest.approx(alone("gpt2")["losses"], rel=1e-5)  # not in float64 throughout


# ------------------------------------------------------------------------------------------ checkpoints


def save(family: str, tp_size: int | None, folder: Path) -> dict[str, Any]:
    with KeepFloat64():
        plugin = None if tp_size is None else gemini(tp_size, max_norm=0.05)
        booster, boosted = boost(plugin, model_of(family))
        train(booster, boosted, family, 0, BEFORE)
        booster.save_model(boosted[0], folder / "model", shard=True, use_safetensors=True)
        booster.save_optimizer(boosted[1], folder / "optimizer", shard=True)
        return train(booster, boosted, family, BEFORE, STEPS)


def load(family: str, tp_size: int | None, folder: Path) -> dict[str, Any]:
    with KeepFloat64():
        model = model_of(family)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        plugin = None if tp_size is None else gemini(tp_size, max_norm=0.05)
        booster, boosted = boost(plugin, model)
        booster.load_model(boosted[0], folder / "model")
        booster.load_optimizer(boosted[1], folder / "optimizer")
        return train(booster, boosted, family, BEFORE, STEPS)


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
def test_checkpoints_are_those_of_one_process(family: str, tmp_path: Path) -> None:
    saved = {"one": run_threads(save, 1, family, None, tmp_path / "one")[0]}
    for world, size in WORLDS.items():
        compare(run_threads(save, size, family, 2, tmp_path / world), saved["one"])
    for folder in ("one", *WORLDS):
        for tp_size, size in ((None, 1), (2, 2), (2, 4), (1, 2)):
            compare(run_threads(load, size, family, tp_size, tmp_path / folder), saved["one"])


# ------------------------------------------------------------------------------------------ lazily built models


def start_lazily(lazily: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    if lazily:
        with LazyInitContext():
            model = build("llama-tied").float()
    else:
        model = build("llama-tied").float()
    assert bool(list(lazy_tensors(model))) == lazily
    booster, boosted = boost(gemini(), model)
    assert not list(lazy_tensors(boosted[0]))
    return train(booster, boosted, "llama-tied", 0, 1)["state"]


def start_both() -> list[dict[str, torch.Tensor]]:
    return [start_lazily(lazily) for lazily in (False, True)]


def test_lazily_built_models_start_and_train_like_others() -> None:
    for eager, lazy in run_processes(start_both, 4):
        assert eager.keys() == lazy.keys()
        assert all(torch.equal(value, lazy[name]) for name, value in eager.items())


# ------------------------------------------------------------------------------------------ adapters


def train_adapters(tp_size: int | None, folder: Path) -> dict[str, Any]:
    from peft import LoraConfig

    with KeepFloat64():
        booster = Booster(device="cpu", plugin=None if tp_size is None else gemini(tp_size, max_norm=0.05))
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = booster.enable_lora(model_of("llama"), lora_config=config).double()
        draws = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64))
        optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.5)
        boosted = booster.boost(model, optimizer)
        found = train(booster, boosted, "llama", 0, STEPS)
        booster.save_lora_as_pretrained(boosted[0], folder, use_safetensors=True)
        return {"losses": found["losses"], "norms": found["norms"], "grads": found["grads"], "state": {}}


@pytest.mark.parametrize("world", WORLDS)
def test_adapters_train_and_are_saved_like_in_one_process(world: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected = run_threads(train_adapters, 1, None, tmp_path / "one")
    compare(run_threads(train_adapters, WORLDS[world], 2, tmp_path / "own"), expected[0])
    own, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "one"))
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_equal(own[name], value, name)


# ------------------------------------------------------------------------------------------ without the plugin


def wrap_by_hand() -> dict[str, Any]:
    with KeepFloat64(), ParallelMesh(tp=2):
        model, _ = ShardFormer(ShardConfig(parallel_output=False)).optimize(model_of("llama"))
        wrapped = GeminiDDP(model, chunk_config_dict=CHUNKS, mixed_precision=None)
        optimizer = GeminiOptimizer(adamw(model), wrapped, max_norm=0.05)
        return train(Booster(device="cpu", plugin=gemini()), (wrapped, optimizer), "llama", 0, STEPS)


def test_a_sharded_model_goes_into_chunks_without_a_booster() -> None:
    compare(run_threads(wrap_by_hand, 4), alone("llama"))


# ------------------------------------------------------------------------------------------ what is refused


def test_what_cannot_be_sharded() -> None:
    with fake_world(3), pytest.raises(MeshError, match="3"):
        boost(gemini(), nn.Linear(2, 2))
    with fake_world(2):
        with pytest.raises(PlanError, match="Found Linear"):
            boost(gemini(), nn.Linear(2, 2))
        with pytest.raises(UnsupportedError, match="Linear"):
            boost(gemini(tp_size=1, enable_jit_fused=True), nn.Linear(2, 2))
        model = model_of("gpt2")
        stepped = adamw(model)
        model(**inputs_of("gpt2")).loss.backward()
        stepped.step()
        with pytest.raises(ConfigError, match="before its first step"):
            Booster(device="cpu", plugin=gemini()).boost(model, stepped)


def test_layers_that_are_sharded_already_are_not_sharded_again() -> None:
    with fake_world(4), ParallelMesh(tp=2) as mesh:
        layer = parallel.Linear(8, 8)
        shape, plugin = layer.weight.shape, gemini()
        booster, (model, *_) = boost(plugin, layer)
        assert plugin.mesh is mesh
        assert booster.plugin.data_parallel_rank_and_size() == (0, 2)
        assert model.unwrap().weight.shape == shape


def test_loaders_give_ranks_of_tp_the_same_samples() -> None:
    def program() -> list[list[int]]:
        return [batch.tolist() for batch in gemini().prepare_dataloader(torch.arange(8), batch_size=2)]

    ranks = run_threads(program, 4)
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
