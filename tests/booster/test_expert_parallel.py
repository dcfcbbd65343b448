# pyright: reportArgumentType=false, reportCallIssue=false
"""Experts of Hugging Face models that are sharded over ranks, beyond the worlds of `test_hybrid_parallel.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equality import assert_equal
from families import EXPERTS, build, inputs_of
from float64 import KeepFloat64
from plugins import plugins
from torch import nn

from colossal._src.interface import unwrap_model
from colossal._src.nn.moe import ExpertParallel
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, TorchFSDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ColossalError, ConfigError, PlanError, UnsupportedError
from colossal.shardformer import GradientCheckpointConfig, ShardConfig, ShardFormer
from colossal.testing import assert_equal_to_one_process, fake_world, run_processes

PLUGINS = plugins("DDP", "ZeRO-1", "ZeRO-2", "Gemini")
STEPS = 3


def batch_of(step: int, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
    pairs = [inputs_of("mixtral", num_changed=each) for each in (step, step + 4)]
    return {key: torch.cat([pair[key] for pair in pairs]).chunk(parts)[part] for key in pairs[0]}


def train(booster: Booster, model: Any, optimizer: Any, part: int = 0, parts: int = 1) -> torch.Tensor:
    norms: list[float] = []
    for step in range(STEPS):
        with KeepFloat64():
            booster.backward(model(**batch_of(step, part, parts)).loss, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(norms, dtype=torch.float64)


def boost(plugin: Any, model: nn.Module) -> tuple[Booster, Any, Any]:
    booster = Booster(device="cpu", plugin=plugin)
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))[:2]


def train_sharded(expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ParallelMesh(dp=2, ep=2) as mesh:
        for name, make in PLUGINS.items():
            model, _ = ShardFormer(ShardConfig(mesh)).optimize(build("mixtral"))
            booster, model, optimizer = boost(make(), model)
            found[name] = train(booster, model, optimizer, mesh.rank("dp"), 2)
            assert_equal_to_one_process(model, expected, atol=1e-9)
    return found


@pytest.mark.slow
def test_under_plugins_that_shard_no_layers() -> None:
    booster, model, optimizer = boost(None, build("mixtral"))
    norms = train(booster, model, optimizer)
    expected = {name: each.detach() for name, each in unwrap_model(model).named_parameters()}
    for found in run_processes(train_sharded, 2, expected):
        for name in PLUGINS:
            assert_equal(found[name], norms, f"{name}: norms")


def train_with_recomputation() -> torch.Tensor:
    config = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    plugin = HybridParallelPlugin(1, 1, ep_size=2, precision="fp32", gradient_checkpoint_config=config)
    booster, model, optimizer = boost(plugin, build("mixtral"))
    return train(booster, model, optimizer, plugin.mesh.rank("dp"), 2)


def test_layers_that_compute_their_activations_again() -> None:
    expected = train(*boost(None, build("mixtral")))
    for norms in run_processes(train_with_recomputation, 2):
        assert_equal(norms, expected, "norms")


# ------------------------------------------------------------------------------------------ files

SAVING = {"ep_size": 4, "zero_stage": 1}
READING: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep_size": 2}),
    "tp2-ep2": (2, {"ep_size": 2, "tp_size": 2}),
    "tp2": (2, {"tp_size": 2}),
    "pp2-ep2": (4, {"ep_size": 2, "pp_size": 2, "num_microbatches": 2}),
    "one": (1, {}),
}


def hybrid(options: dict[str, Any]) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | options)


def save(name: str, folder: Path) -> None:
    plugin = hybrid(SAVING)
    booster, model, optimizer = boost(plugin, build(name))
    train(booster, model, optimizer, plugin.mesh.rank("dp"), 4)
    booster.save_model(model, str(folder / "model"), shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, str(folder / "optimizer"), shard=True)


def load(name: str, options: dict[str, Any], folder: Path) -> None:
    """Save what was loaded; and take a step, so that states of the optimizer count."""
    plugin = hybrid(options)
    booster, model, optimizer = boost(plugin, build(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    booster.load_model(model, str(folder / "model"))
    booster.load_optimizer(optimizer, str(folder / "optimizer"))
    label = "-".join(map(str, options.values()))
    booster.save_model(model, str(folder / f"again-{label}"), shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, str(folder / f"optimizer-{label}"), shard=True)


def read(folder: Path, pattern: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob(pattern)):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt-oss", "olmoe"))]
)
def test_files_are_those_of_all_experts(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config: Any = build(name).config
    config.save_pretrained(tmp_path / "model")
    run_processes(save, 4, name, tmp_path)
    kind: Any = getattr(transformers, EXPERTS[name][0])
    from_files = kind.from_pretrained(tmp_path / "model", dtype=torch.float64).state_dict()
    saved = read(tmp_path / "model", "*.safetensors")
    assert all(torch.equal(from_files[key], value) for key, value in saved.items())
    assert saved.keys() == from_files.keys()
    for size, options in READING.values():
        if name == "gpt-oss" and options.keys() == {"tp_size"}:
            continue  # its table has no row for tp
        run_processes(load, size, name, options, tmp_path)
        label = "-".join(map(str, options.values()))
        again = read(tmp_path / f"again-{label}", "*.safetensors")
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[key], value) for key, value in saved.items())
        states, first = (read(tmp_path / each, "*.safetensors") for each in (f"optimizer-{label}", "optimizer"))
        assert states.keys() == first.keys()
        assert all(torch.equal(states[key], value) for key, value in first.items())


# ------------------------------------------------------------------------------------------ the older name


def train_under_the_older_name() -> torch.Tensor:
    from colossal.booster.plugin import MoeHybridParallelPlugin

    plugin = MoeHybridParallelPlugin(1, 1, 2, None, "fp32", zero_stage=1, expert_exchange="all_gather")
    booster, model, optimizer = boost(plugin, build("mixtral"))
    assert all(each.exchange == "all_gather" for each in model.unwrap().modules() if isinstance(each, ExpertParallel))
    return train(booster, model, optimizer, plugin.mesh.rank("dp"), 2)


def test_the_older_plugin_for_experts() -> None:
    expected = train(*boost(None, build("mixtral")))
    for norms in run_processes(train_under_the_older_name, 2):
        assert_equal(norms, expected, "norms")


# ------------------------------------------------------------------------------------------ what is refused


def test_copies_of_experts_on_consecutive_ranks_are_refused() -> None:
    from colossal.legacy.booster import MoeHybridParallelPlugin

    with pytest.raises(UnsupportedError, match="moe_dp_outside=False. Leave it out"):
        MoeHybridParallelPlugin(1, 1, 2, moe_dp_outside=False)


def test_sequence_overlap_is_that_of_the_ring() -> None:
    from colossal.legacy.booster import MoeHybridParallelPlugin

    ring = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring"}
    with fake_world(2):
        assert MoeHybridParallelPlugin(pp_size=1, ep_size=2, enable_sequence_overlap=True, **ring).tp_size == 2
    for options in ({"tp_size": 2}, ring | {"sequence_parallelism_mode": "split_gather"}):
        with pytest.raises(UnsupportedError, match=r"Found enable_sequence_overlap=True with .* Pass True and 'ring'"):
            MoeHybridParallelPlugin(pp_size=1, ep_size=2, enable_sequence_overlap=True, **options)


def test_a_model_without_experts_is_refused() -> None:
    with fake_world(2), pytest.raises(PlanError, match=r"Found .*ep=2.*LlamaForCausalLM, which has none.*Leave ep out"):
        boost(hybrid({"ep_size": 2}), build("llama"))


def test_experts_that_tp_cannot_shard_are_refused() -> None:
    with fake_world(2), pytest.raises(PlanError, match=r"over the ep axis only.*Found GptOssExperts.*Pass ep=2"):
        boost(hybrid({"tp_size": 2}), build("gpt-oss"))


def test_a_choice_of_how_tokens_come_to_experts_is_not_ignored() -> None:
    with fake_world(2):
        with pytest.raises(ConfigError, match=r"all_to_all, all_gather. Found 'broadcast'"):
            hybrid({"ep_size": 2, "expert_exchange": "broadcast"})
        with pytest.raises(ConfigError, match=r"Found 'all_gather' on .*tp=1.* an ep size of 2 or more"):
            boost(hybrid({"expert_exchange": "all_gather"}), build("mixtral"))
        with ParallelMesh(ep=2) as mesh:
            model, _ = ShardFormer(ShardConfig(mesh)).optimize(build("mixtral"))
            with pytest.raises(ConfigError, match=r"sharded already, in Mixtral.*exchange='all_gather' to the layers"):
                boost(hybrid({"ep_size": 2, "expert_exchange": "all_gather"}), model)


@pytest.mark.parametrize("size", [3, 0])
def test_sizes_that_do_not_divide_are_refused(size: int) -> None:
    with fake_world(2), pytest.raises(ColossalError, match=rf"ep(_size)?={size}"):
        boost(hybrid({"ep_size": size}), build("mixtral"))


def test_fsdp_is_refused() -> None:
    with fake_world(2), ParallelMesh(ep=2) as mesh:
        model, _ = ShardFormer(ShardConfig(mesh)).optimize(build("mixtral").float())
        with pytest.raises(UnsupportedError, match="shard"):
            boost(TorchFSDPPlugin(), model)
