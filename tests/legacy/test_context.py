# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
"""`global_context` shows the mesh in the order, and under the names, of the older documentation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal._src.cluster import OWN_MODES, mesh_options, set_ambient_mesh, set_current_config
from colossal.cluster import Config, ParallelMesh, launch
from colossal.context import ParallelMode, seed
from colossal.context.random import add_seed, get_seeds, get_states, reset_seeds, set_mode, with_seed
from colossal.core import global_context as gpc
from colossal.errors import ConfigError, MeshError
from colossal.legacy.context import INITIALIZER_MAPPING, ProcessGroupInitializer
from colossal.legacy.registry import DIST_GROUP_INITIALIZER, LAYERS, LR_SCHEDULERS, OPTIMIZERS, Registry
from colossal.legacy.utils import checkpoint
from colossal.testing import fake_world, run_processes, run_threads


@pytest.fixture
def own_mode() -> Iterator[None]:
    yield
    OWN_MODES.pop("pairs", None)


def arranged(parallel: dict[str, Any], world_size: int) -> ParallelMesh:
    return ParallelMesh(**mesh_options(Config(parallel=parallel), world_size))


# What the original's initializers of groups give for these sizes, by their definition: dp outside, tp innermost.
GROUPS: list[tuple[dict[str, Any], int, int, dict[str, list[int]]]] = [
    (
        {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
        8,
        5,
        {
            "GLOBAL": list(range(8)),
            "DATA": [1, 5],
            "PIPELINE": [5, 7],
            "TENSOR": [4, 5],
            "PARALLEL_1D": [4, 5],
            "MODEL": [4, 5, 6, 7],
        },
    ),
    (
        {"tensor": {"size": 4, "mode": "2d"}},
        8,
        6,
        {"DATA": [2, 6], "TENSOR": [4, 5, 6, 7], "PARALLEL_2D_ROW": [6, 7], "PARALLEL_2D_COL": [4, 6]},
    ),
    (
        {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
        8,
        6,
        {
            "PARALLEL_2P5D_ROW": [6, 7],
            "PARALLEL_2P5D_COL": [4, 6],
            "PARALLEL_2P5D_DEP": [2, 6],
            "PARALLEL_2P5D_XZ": [0, 2, 4, 6],
        },
    ),
    (
        {"tensor": {"size": 4, "mode": "sequence"}},
        8,
        6,
        {"DATA": [2, 6], "TENSOR": [4, 5, 6, 7], "SEQUENCE": [4, 5, 6, 7], "SEQUENCE_DP": list(range(8))},
    ),
]


@pytest.mark.parametrize(("parallel", "world_size", "rank", "groups"), GROUPS)
def test_the_groups_of_a_rank(parallel: Any, world_size: int, rank: int, groups: dict[str, list[int]]) -> None:
    with fake_world(world_size, rank=rank), arranged(parallel, world_size):
        for name, ranks in groups.items():
            mode = ParallelMode[name]
            assert gpc.is_initialized(mode)
            assert gpc.get_ranks_in_group(mode) == ranks, name
            assert gpc.get_world_size(mode) == len(ranks)
            assert gpc.get_local_rank(mode) == ranks.index(rank)
            place = ranks.index(rank)
            assert gpc.get_next_global_rank(mode) == ranks[(place + 1) % len(ranks)]
            assert gpc.get_prev_global_rank(mode) == ranks[place - 1]
            assert (gpc.is_first_rank(mode), gpc.is_last_rank(mode)) == (place == 0, place == len(ranks) - 1)


def test_the_groups_of_a_cube_are_those_of_its_axes() -> None:
    for rank in range(8):
        with fake_world(8, rank=rank), arranged({"tensor": {"size": 8, "mode": "3d"}}, 8) as mesh:
            for mode, axes in (
                (ParallelMode.PARALLEL_3D_INPUT, ("input",)),
                (ParallelMode.PARALLEL_3D_WEIGHT, ("weight",)),
                (ParallelMode.PARALLEL_3D_OUTPUT, ("output",)),
                (ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT, ("weight", "input")),
                (ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT, ("weight", "output")),
            ):
                assert gpc.get_ranks_in_group(mode) == list(mesh.ranks(*axes))


def test_a_mode_without_a_group_is_an_error_that_names_those_that_there_are() -> None:
    with fake_world(4), arranged({"pipeline": 2}, 4):
        assert not gpc.is_initialized(ParallelMode.TENSOR)
        assert not gpc.is_initialized(ParallelMode.PARALLEL_2D_ROW)
        with pytest.raises(MeshError, match="Found ParallelMode.TENSOR; .* are GLOBAL, DATA, MODEL, PIPELINE"):
            gpc.get_world_size(ParallelMode.TENSOR)


def sum_over_a_depth_of_one() -> tuple[float, int, int, bool]:
    with arranged({"tensor": {"size": 4, "mode": "2.5d", "depth": 1}}, 4):
        mode = ParallelMode.PARALLEL_2P5D_DEP
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total, group=gpc.get_group(mode))
        return total.item(), gpc.get_local_rank(mode), gpc.get_world_size(mode), gpc.is_initialized(mode)


def test_a_grid_that_is_one_rank_deep_has_the_groups_of_its_depth() -> None:
    assert run_threads(sum_over_a_depth_of_one, 4) == [(float(rank), 0, 1, True) for rank in range(4)]


def test_nothing_is_initialized_before_a_launch() -> None:
    assert not gpc.is_initialized(ParallelMode.GLOBAL)


def test_stages_and_chunks() -> None:
    with fake_world(4, rank=3), arranged({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 4):
        assert (gpc.pipeline_parallel_size, gpc.tensor_parallel_size, gpc.data_parallel_size) == (2, 2, 1)
        assert gpc.world_size == 4
        assert (gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()) == (False, True)
        gpc.set_virtual_pipeline_parallel_size(2)
        gpc.set_virtual_pipeline_parallel_rank(0)
        assert not gpc.is_pipeline_last_stage()
        assert gpc.is_pipeline_last_stage(ignore_virtual=True)
        gpc.set_virtual_pipeline_parallel_rank(1)
        assert gpc.is_pipeline_last_stage()
    with fake_world(2), arranged({"pipeline": 2}, 2):
        assert gpc.virtual_pipeline_parallel_size is None  # of the other mesh


def sums_of_modes() -> list[float]:
    found = []
    with arranged({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 4):
        for mode in (ParallelMode.GLOBAL, ParallelMode.MODEL, ParallelMode.PIPELINE, ParallelMode.TENSOR):
            for group in (gpc.get_group(mode), gpc.get_cpu_group(mode)):
                total = torch.tensor(float(dist.get_rank()))
                dist.all_reduce(total, group=group)
                found.append(total.item())
    return found


def test_groups_communicate() -> None:
    ranks = run_threads(sums_of_modes, 4)
    assert ranks[0] == [6, 6, 6, 6, 2, 2, 1, 1]
    assert ranks[3] == [6, 6, 6, 6, 4, 4, 5, 5]


def test_the_config_is_that_of_the_program() -> None:
    assert gpc.config == {}
    gpc.load_config({"BATCH_SIZE": 4})
    assert gpc.config.BATCH_SIZE == 4
    set_current_config(None)


# ------------------------------------------------------------------ own modes


class Pairs(ProcessGroupInitializer):
    """Pairs of ranks, as a program writes it."""

    def __init__(self, *args: Any, own: int) -> None:
        super().__init__(*args[:3])  # three of the six, as the documented program
        self.own = own

    def init_parallel_groups(self) -> Any:
        first = self.rank // 2 * 2
        group = [dist.new_group([start, start + 1]) for start in range(0, self.world_size, 2)][first // 2]
        return self.rank - first, 2, group, None, [first, first + 1], ParallelMode("pairs")


def train_in_pairs(port: int) -> tuple[Any, ...]:
    import os

    if "pairs" not in ParallelMode._value2member_map_:
        ParallelMode.PAIRS = "pairs"
    DIST_GROUP_INITIALIZER.register_module(Pairs)
    INITIALIZER_MAPPING["pairs"] = "Pairs"
    config = {"parallel": {"tensor": {"size": 2, "mode": "pairs", "own": 3}}}
    launch(config, int(os.environ["RANK"]), 4, "127.0.0.1", port, verbose=False)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=gpc.get_group(ParallelMode("pairs")))
    return gpc.get_ranks_in_group(ParallelMode("pairs")), gpc.get_local_rank(ParallelMode("pairs")), total.item()


@pytest.mark.usefixtures("own_mode")
def test_a_program_forms_the_groups_of_its_own_mode_at_launch() -> None:
    from ports import free_port

    ranks = run_processes(train_in_pairs, 4, free_port(), form=False, environment={"RANK": "{rank}"})
    assert ranks == [([0, 1], 0, 1.0), ([0, 1], 1, 1.0), ([2, 3], 0, 5.0), ([2, 3], 1, 5.0)]


def arrange_pairs() -> list[int]:
    if "pairs" not in ParallelMode._value2member_map_:
        ParallelMode.PAIRS = "pairs"
    DIST_GROUP_INITIALIZER.register_module(Pairs)
    INITIALIZER_MAPPING["pairs"] = "Pairs"
    gpc.load_config({"parallel": {"tensor": {"size": 2, "mode": "pairs", "own": 3}}})
    try:
        gpc.init_parallel_groups()
        return gpc.get_ranks_in_group(ParallelMode("pairs"))
    finally:
        set_current_config(None)
        OWN_MODES.pop("pairs", None)


@pytest.mark.usefixtures("own_mode")
def test_a_program_that_arranges_its_processes_itself_has_the_groups_of_its_own_mode() -> None:
    assert run_processes(arrange_pairs, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_new_mode_has_a_name_and_a_value_of_its_own() -> None:
    with pytest.raises(ValueError, match="Found DATA='other'"):
        ParallelMode.DATA = "other"
    with pytest.raises(ValueError, match="Found OTHER='data'"):
        ParallelMode.OTHER = "data"


# ------------------------------------------------------------------ generators


def draws() -> tuple[float, float, float, float]:
    with arranged({"tensor": {"size": 2, "mode": "1d"}}, 4):
        gpc.set_seed(7)
        before = torch.get_rng_state()
        with seed(ParallelMode.TENSOR):
            apart = torch.rand(()).item()
        assert torch.equal(torch.get_rng_state(), before)
        with seed(ParallelMode.DATA):
            together = torch.rand(()).item()
        again = with_seed(lambda: torch.rand(()).item(), ParallelMode.TENSOR)()
        assert get_seeds().keys() == get_states(copy=True).keys() == {ParallelMode.DATA, ParallelMode.TENSOR}
        return apart, together, again, torch.rand(()).item()


def test_tensor_parallel_ranks_draw_apart_and_replicas_together() -> None:
    apart, together, again, outside = zip(*run_processes(draws, 4), strict=True)
    assert len(set(together)) == len(set(outside)) == 1
    assert apart[0] == apart[2] != apart[1] == apart[3]
    assert apart[0] != again[0]


def test_a_mode_needs_a_seed_and_has_one() -> None:
    with fake_world(2), ParallelMesh(tp=2):
        gpc.set_seed(3)
        with pytest.raises(ConfigError, match="A mode has one seed"):
            add_seed(ParallelMode.DATA, 4)
        with pytest.raises(ConfigError, match="Found ParallelMode.PIPELINE; there are DATA, TENSOR"):
            set_mode(ParallelMode.PIPELINE)


def test_a_process_has_seeds_of_modes_before_a_launch() -> None:
    before = torch.get_rng_state()
    try:
        add_seed(ParallelMode.GLOBAL, 5)
        add_seed(ParallelMode.DATA, 6)
        assert get_seeds() == {ParallelMode.GLOBAL: 5, ParallelMode.DATA: 6}
        set_mode(ParallelMode.GLOBAL)
        first = torch.rand(3)
        with seed(ParallelMode.DATA):
            apart = torch.rand(3)
        reset_seeds()
        assert get_seeds() == {}
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), first)
        torch.manual_seed(6)
        assert torch.equal(torch.rand(3), apart)
        add_seed(ParallelMode.DATA, 6)
        x, drawn = torch.ones(8, requires_grad=True), list[torch.Tensor]()

        def drop(values: torch.Tensor) -> torch.Tensor:
            with seed(ParallelMode.DATA):
                drawn.append(torch.nn.functional.dropout(values, 0.5))
            return drawn[-1]

        checkpoint(drop, False, x).sum().backward()
        first, again = drawn
        assert torch.equal(first, again)  # the backward pass draws as the forward pass did
    finally:
        reset_seeds()
        torch.set_rng_state(before)


# ------------------------------------------------------------------ registries


def test_a_registry_knows_what_is_registered_and_its_libraries() -> None:
    own = Registry("things", third_party_library=[torch.nn])

    @own.register_module
    def thing() -> int:
        return 3

    assert own.get_module("thing")() == 3
    assert own.get_module("ReLU") is torch.nn.ReLU
    assert (own.has("thing"), own.has("ReLU"), own.has("nothing")) == (True, True, False)
    with pytest.raises(ConfigError, match="Found 'nothing' among things, which has thing"):
        own.get_module("nothing")
    with pytest.raises(ConfigError, match="unique"):
        own.register_module(type("thing", (), {}))


def test_the_documented_registries_find_what_configs_name() -> None:
    assert LAYERS.get_module("Linear") is torch.nn.Linear
    assert OPTIMIZERS.get_module("Lamb").__name__ == "Lamb"
    assert LR_SCHEDULERS.get_module("CosineAnnealingWarmupLR").__name__ == "CosineAnnealingWarmupLR"


def test_groups_follow_the_config_when_they_are_made_again() -> None:
    with fake_world(4):
        gpc.load_config({"parallel": {"pipeline": 2}})
        gpc.init_parallel_groups()
        assert gpc.pipeline_parallel_size == 2
        set_ambient_mesh(None)
        set_current_config(None)
