"""The documented program of one-file checkpoints, in every mode of tensor parallelism, with and without a pipeline."""

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal import nn as col_nn
from colossal._src.cluster import set_current_config
from colossal.cluster import ParallelMesh
from colossal.errors import CheckpointError, ConfigError
from colossal.legacy import initialize
from colossal.legacy.context import ParallelMode, global_context
from colossal.legacy.pipeline import partition_uniform
from colossal.legacy.utils import is_using_pp, load_checkpoint, save_checkpoint
from colossal.testing import run_processes, run_threads

gather_pipeline_parallel_state_dict: Any = importlib.import_module(
    "colossal.utils.checkpointing"
).gather_pipeline_parallel_state_dict

IN, WIDTH, OUT = 4, 8, 12
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (4, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}),
    "2d": (4, {"tensor": {"size": 4, "mode": "2d"}}),
    "2.5d": (4, {"tensor": {"size": 4, "mode": "2.5d", "depth": 1}}),
    "1d of 4, pipeline": (8, {"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "1d"}}),
    "2d, pipeline": (8, {"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}}),
    "2.5d, pipeline": (8, {"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2.5d", "depth": 1}}),
    "2.5d of 8": (8, {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}),
    "3d": (8, {"tensor": {"size": 8, "mode": "3d"}}),
    "data, 1d": (4, {"tensor": {"size": 2, "mode": "1d"}}),
}
BY_RANKS = [pytest.param(name, marks=[pytest.mark.slow] if name != "1d" else []) for name in MODES]


def serial(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)).double()


def own_part(model: nn.Sequential) -> nn.Sequential:
    """What a rank of a pipeline has, with placeholders for the layers of others."""
    if not is_using_pp():
        return model
    parts = partition_uniform(len(model), global_context.get_world_size(ParallelMode.PIPELINE), 1)
    begin, end = parts[global_context.get_local_rank(ParallelMode.PIPELINE)][0]
    return nn.Sequential(*(each if begin <= at < end else nn.Identity() for at, each in enumerate(model)))


def parallel(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return own_part(nn.Sequential(col_nn.Linear(IN, WIDTH), col_nn.Linear(WIDTH, OUT)).double())


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, col_nn.ParallelLayer)}
    return {
        f"{name}.{key}": each.full_parameter(key) for name, each in layers.items() for key, _ in each.named_parameters()
    }


def run_program(parallel_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the file of a serial model into layers of the mode, in stages; save them, and load that elsewhere."""
    global_context.load_config({"parallel": parallel_config, "NUM_MICRO_BATCHES": 2})
    global_context.init_parallel_groups()
    try:
        saved, fresh = serial(seed=1), parallel(seed=2)
        save_checkpoint(folder / "serial.pt", 3, saved)
        epoch = load_checkpoint(folder / "serial.pt", fresh)
        # On one rank of each tensor-parallel group, as the documented program calls it.
        stages = None
        if global_context.get_local_rank(ParallelMode.TENSOR) == 0:
            with pytest.raises(ConfigError, match="Call save_checkpoint"):
                gather_pipeline_parallel_state_dict(fresh.state_dict())
        full = full_state(fresh)
        if global_context.get_local_rank(ParallelMode.TENSOR) == 0:
            stages = gather_pipeline_parallel_state_dict(full)
        copy = io.BytesIO()
        torch.save(fresh.state_dict(), copy)
        copy.seek(0)
        again = torch.load(copy, weights_only=True)
        for name, value in fresh.state_dict().items():
            assert torch.equal(again[name], value)
        engine, *_ = initialize(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), nn.MSELoss(), verbose=False)
        save_checkpoint(folder / "parallel.pt", epoch + 1, engine.model, engine.optimizer)
        return {"epoch": epoch, "stages": stages, "is_first": global_context.get_global_rank() == 0}
    finally:
        set_current_config(None)


@pytest.mark.parametrize("name", BY_RANKS)
def test_a_serial_model_goes_into_a_mode_and_back(name: str, tmp_path: Path) -> None:
    size, config = MODES[name]
    ranks = run_processes(run_program, size, config, tmp_path)
    expected = serial(seed=1).state_dict()
    assert [rank["epoch"] for rank in ranks] == [3] * size
    gathered = [rank["stages"] for rank in ranks if rank["stages"] is not None]
    assert gathered
    for stages in gathered:
        torch.testing.assert_close(stages, dict(expected), rtol=0, atol=0)
    restored = serial(seed=5)
    assert load_checkpoint(tmp_path / "parallel.pt", restored) == 4
    torch.testing.assert_close(dict(restored.state_dict()), dict(expected), rtol=0, atol=0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["parallel.pt", "serial.pt"]


def load_in_another_mode(parallel_config: dict[str, Any], folder: Path, source: str, target: str) -> None:
    global_context.load_config({"parallel": parallel_config})
    global_context.init_parallel_groups()
    try:
        model = parallel(seed=3)
        load_checkpoint(folder / source, model)
        for key, value in full_state(model).items():
            torch.testing.assert_close(value, serial(seed=1).state_dict()[key], rtol=0, atol=0)
        save_checkpoint(folder / target, 0, model)
    finally:
        set_current_config(None)


@pytest.mark.slow
def test_a_file_goes_through_all_modes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "0.pt", 0, serial(seed=1))
    modes = ["data, 1d", "2d", "2.5d", "2.5d of 8", "3d", "data, 1d"]
    for number, name in enumerate(modes):
        size, config = MODES[name]
        run_processes(load_in_another_mode, size, config, tmp_path, f"{number}.pt", f"{number + 1}.pt")
    restored = serial(seed=5)
    load_checkpoint(tmp_path / f"{len(modes)}.pt", restored)
    torch.testing.assert_close(dict(restored.state_dict()), dict(serial(seed=1).state_dict()), rtol=0, atol=0)


def test_shards_of_one_stage_are_refused_on_all_ranks() -> None:
    def program() -> None:
        with ParallelMesh(pp=2, tp=2) as mesh:
            layer = col_nn.Linear(IN, WIDTH)
            state = layer.state_dict() if mesh.rank("pp") else {"weight": layer.full_parameter("weight")}
            with pytest.raises(ConfigError, match="where tensor parallelism has 2"):
                gather_pipeline_parallel_state_dict(state)

    run_threads(program, 4)


def test_a_file_of_another_model_is_refused_by_all_ranks(tmp_path: Path) -> None:
    def program() -> None:
        with ParallelMesh(tp=2), pytest.raises(CheckpointError, match="0.weight"):
            load_checkpoint(tmp_path / "other.pt", col_nn.Linear(IN, WIDTH))

    save_checkpoint(tmp_path / "other.pt", 0, serial(seed=1))
    run_threads(program, 2)
