"""What programs configure themselves by, and the mesh that it describes."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from colossal._src.cluster import OWN_MODES, mesh_options
from colossal.cluster import Config, ParallelMesh
from colossal.errors import ConfigError, MeshError
from colossal.testing import fake_world


def test_entries_are_attributes_and_dicts_in_it_are_configs() -> None:
    config = Config({"parallel": {"tensor": {"size": 2}}}, BATCH_SIZE=8)
    config.parallel.tensor.mode = "1d"
    config.update({"fp16": {"mode": "torch"}}, BATCH_SIZE=16)
    config.setdefault("zero", {"stage": 2})
    assert config["parallel"]["tensor"] == {"size": 2, "mode": "1d"}
    assert (config.BATCH_SIZE, config.fp16.mode, config.zero.stage) == (16, "torch", 2)
    assert hasattr(config, "BATCH_SIZE")
    assert not hasattr(config, "nothing")
    assert getattr(config, "gradient_accumulation", 1) == 1
    del config.zero
    with pytest.raises(AttributeError, match="has no 'zero'; it has parallel, BATCH_SIZE, fp16"):
        _ = config.zero
    with pytest.raises(KeyError, match="the config has parallel"):
        _ = config["zero"]


def test_a_config_is_copied_and_pickled_as_one() -> None:
    config = Config(model={"depth": 2})
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301 (made here)
        assert other == config
        assert other.model.depth == 2
        assert other.model is not config.model


def test_a_file_gives_its_variables_without_modules_and_classes(tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text("HIDDEN = 32\n")
    path = tmp_path / "config.py"
    path.write_text(
        "import os\nfrom sizes import HIDDEN\nfrom pathlib import Path\nDEPTH = 2\nmodel = dict(width=HIDDEN)"
    )
    config = Config.from_file(path)
    assert config == {"HIDDEN": 32, "DEPTH": 2, "model": {"width": 32}}
    assert Config.from_file(str(path)).model.width == 32


@pytest.mark.parametrize(("name", "found"), [("config.yaml", "the kind .yaml"), ("gone.py", "no such file")])
def test_another_file_is_an_error(name: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("DEPTH: 2")
    with pytest.raises(ConfigError, match=f"Found .*{found} at .*{name}"):
        Config.from_file(tmp_path / name)


def test_the_names_are_strings() -> None:
    with pytest.raises(ConfigError, match="Found 3"):
        Config({3: 4})  # pyright: ignore[reportArgumentType]


MESHES: list[tuple[dict[str, Any], int, dict[str, int], tuple[int, ...]]] = [
    ({}, 4, {"dp": 4}, (0, 1, 2, 3)),
    ({"data": 4}, 4, {"dp": 4}, (0, 1, 2, 3)),
    ({"pipeline": 2}, 4, {"pp": 2, "dp": 2}, (0, 2)),
    ({"pipeline": {"size": 2}, "tensor": {"size": 1, "mode": None}}, 4, {"pp": 2, "dp": 2}, (0, 2)),
    ({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}, "data": 2}, 8, {"pp": 2, "dp": 2, "tp": 2}, (0, 4)),
    ({"tensor": {"size": 4, "mode": "2d"}}, 8, {"tp": 4, "dp": 2, "row": 2, "col": 2}, (0, 4)),
    ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 16, {"tp": 8, "depth": 2, "row": 2}, (0, 8)),
    ({"tensor": {"size": 8, "mode": "3d"}}, 8, {"tp": 8, "input": 2, "weight": 2, "output": 2}, (0,)),
    ({"tensor": {"size": 4, "mode": "sequence"}}, 8, {"sp": 4, "tp": 1, "dp": 2}, (0, 4)),
    ({"sequence": 2, "pipeline": 2}, 8, {"sp": 2, "pp": 2, "dp": 2}, (0, 4)),
    ({"moe": {"size": 2}}, 4, {"dp": 4, "ep": 2, "edp": 2}, (0, 1, 2, 3)),
    ({"moe": 2, "pipeline": 2}, 8, {"pp": 2, "dp": 4, "ep": 2}, (0, 2, 4, 6)),
]


@pytest.mark.parametrize(("parallel", "world_size", "sizes", "replicas"), MESHES)
def test_the_mesh_of_a_config(parallel: Any, world_size: int, sizes: dict[str, int], replicas: tuple[int, ...]) -> None:
    with fake_world(world_size):
        mesh = ParallelMesh(**mesh_options(Config(parallel=parallel), world_size))
        assert {axis: mesh.size(axis) for axis in sizes} == sizes  # pyright: ignore[reportArgumentType]
        assert mesh.ranks("dp") == replicas


@pytest.mark.parametrize(
    ("parallel", "kind", "found"),
    [
        ({"tensor": 4}, ConfigError, r"Write tensor=dict\(size=4, mode='1d'\)"),
        ({"tensor": {"size": 2}}, ConfigError, "Tensor parallelism has a mode"),
        ({"tensor": {"size": 2, "mode": "4d"}}, ConfigError, "Found '4d'"),
        ({"tensor": {"size": "2", "mode": "1d"}}, ConfigError, "size of parallel.tensor is an integer"),
        ({"pipeline": 0}, ConfigError, "size of parallel.pipeline"),
        ({"pipe": 2}, ConfigError, r"Found \['pipe'\]"),
        ({"sequence": 2, "tensor": {"size": 4, "mode": "sequence"}}, ConfigError, "sharded by one size"),
        ({"pipeline": 3}, MeshError, "Found pp 3 x sp 1 x tp 1 in a job of 4. .*start 3 processes"),
        ({"pipeline": 2, "data": 4}, MeshError, "x data 4 in a job of 4. .*start 8 processes"),
        ({"moe": {"size": "2"}}, ConfigError, "size of parallel.moe is an integer"),
        (3, ConfigError, "parallel is a dict"),
    ],
)
def test_a_wrong_entry_says_what_to_write(parallel: Any, kind: type[Exception], found: str) -> None:
    with pytest.raises(kind, match=found):
        mesh_options(Config(parallel=parallel), 4)


def test_a_mode_of_the_programs_own_needs_no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN_MODES, "pairs", "PairInitializer")
    options = mesh_options(Config(parallel={"tensor": {"size": 2, "mode": "pairs", "own": 3}}), 4)
    assert options == {"pp": 1, "sp": 1, "tp": 2, "dp_outside": True}
