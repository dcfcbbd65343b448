"""Bases of wrappers and optimizers, and checkpoints, by the older names."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colossal.booster import Booster
from colossal.errors import ConfigError, UnsupportedError
from colossal.interface import ModelWrapper, OptimizerWrapper
from colossal.legacy.cluster import ProcessGroupMesh
from colossal.legacy.interface import (
    AMPModelMixin,
    DistributedOptim,
    HybridParallelCheckpointIO,
    get_param_info,
    shard_config_of_groups,
)
from colossal.testing import fake_world, run_threads


class OwnModel(ModelWrapper, AMPModelMixin):
    """A wrapper as a program writes it."""


class OwnOptimizer(DistributedOptim, torch.optim.SGD):
    """An optimizer as a program writes it."""

    def setup_distributed(self, tp_group: Any = None, *_args: Any, **_kwargs: Any) -> None:
        self.tp_group = tp_group


def test_a_program_derives_its_own() -> None:
    model: Any = OwnModel(nn.Linear(2, 1))
    model.update_master_params()
    optimizer = OwnOptimizer(model.parameters(), lr=1.0)
    optimizer.setup_distributed("group")
    before = model.unwrap().weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.unwrap().weight, before - 1)
    assert optimizer.tp_group == "group"
    with pytest.raises(TypeError, match="setup_distributed"):
        type("Incomplete", (DistributedOptim,), {})([nn.Parameter(torch.ones(1))], {})


def test_a_checkpoint_of_all_ranks(tmp_path: Path) -> None:
    def program() -> None:
        mesh = ProcessGroupMesh(2, 1, 1)
        groups = [mesh.get_group_along_axis(axis) for axis in range(3)]
        saving = HybridParallelCheckpointIO(*groups, zero_stage=1)
        saved, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
        nn.init.constant_(saved.weight, 2.0)
        saving.save_model(saved, tmp_path / "model", shard=True)
        saving.load_model(fresh, tmp_path / "model")
        assert torch.equal(fresh.weight, saved.weight)
        with pytest.raises(ConfigError, match=r"groups of \[1, 1, 1\]"):
            HybridParallelCheckpointIO(groups[1], groups[1], groups[2])

    run_threads(program, 2)
    assert (tmp_path / "model").is_dir()


def test_shard_options_of_process_groups() -> None:
    with fake_world(8, rank=5):
        mesh = ProcessGroupMesh(2, 2, 2)
        tp, sp = mesh.get_group_along_axis(2), mesh.get_group_along_axis(1)
        config = shard_config_of_groups(tp, enable_flash_attention=True, parallel_output=False)
        assert config.mesh is not None
        assert (config.mesh.ranks("tp"), config.mesh.size("dp")) == ((4, 5), 4)
        assert (config.enable_flash_attention, config.parallel_output) == (True, False)
        both = shard_config_of_groups(
            tp, sp, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all", sp_axis=1, pg_mesh=mesh
        )
        assert both.mesh is not None
        assert (both.mesh.ranks("tp"), both.mesh.ranks("sp")) == ((4, 5), (5, 7))
        with both.mesh as ambient:
            assert shard_config_of_groups(tp).mesh is ambient
        assert shard_config_of_groups().mesh.size("tp") == 8
        assert shard_config_of_groups(enable_tensor_parallelism=False).mesh.size("tp") == 1
        with pytest.raises(ConfigError, match=r"Found \{'tp': \[1, 5\]\}"):
            shard_config_of_groups(mesh.get_group_along_axis(0))
        experts = shard_config_of_groups(ep_group=tp).mesh
        assert (experts.size("ep"), experts.size("tp"), [*experts.ranks("ep")]) == (2, 1, [4, 5])
        with pytest.raises(ConfigError, match=r"Found \{'ep': \[1, 5\]\}"):
            shard_config_of_groups(ep_group=mesh.get_group_along_axis(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("extra_kwargs", {"a": 1}),
        ("fp8_communication", True),
        ("make_vocab_size_divisible_by", 128),
        ("pipeline_stage_manager", SimpleNamespace(num_stages=2)),
    ],
)
def test_shard_options_that_cannot_be_honored_are_refused(name: str, value: Any) -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match=f"Found {name}"):
        shard_config_of_groups(**{name: value})


def test_parameters_are_recorded_by_number() -> None:
    weights = [nn.Parameter(torch.ones(size)) for size in (1, 2, 3)]
    optimizer = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:], "lr": 2.0}], lr=1.0)
    info = get_param_info(optimizer)
    assert [group["params"] for group in info["param_groups"]] == [[0, 1], [2]]
    assert [group["lr"] for group in info["param_groups"]] == [1.0, 2.0]
    assert [info["param2shape"][info["id2param"][number]] for number in range(3)] == [(1,), (2,), (3,)]
    assert [info["param2id"][id(weight)] for weight in weights] == [0, 1, 2]
    assert get_param_info(None) == {}


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("torch_ddp_plugin", "TorchDDPModel", ModelWrapper),
        ("torch_fsdp_plugin", "TorchFSDPModel", ModelWrapper),
        ("torch_fsdp_plugin", "FSDPOptimizerWrapper", OptimizerWrapper),
        ("low_level_zero_plugin", "LowLevelZeroModel", ModelWrapper),
        ("hybrid_parallel_plugin", "HybridParallelModule", ModelWrapper),
        ("hybrid_parallel_plugin", "HybridParallelAMPOptimizer", OptimizerWrapper),
        ("hybrid_parallel_plugin", "get_param_info", get_param_info),
    ],
)
def test_the_wrappers_of_plugins_have_their_older_names(module: str, name: str, ours: object) -> None:
    assert getattr(importlib.import_module(f"colossal.booster.plugin.{module}"), name) is ours


def test_a_boosted_model_is_of_the_class_that_programs_ask_for() -> None:
    older = importlib.import_module("colossal.booster.plugin.torch_ddp_plugin")

    def program() -> bool:
        model, *_ = Booster(plugin=older.TorchDDPPlugin()).boost(nn.Linear(2, 1))
        return isinstance(model, older.TorchDDPModel)

    assert run_threads(program, 2) == [True, True]
