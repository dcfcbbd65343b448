# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportReturnType=false
"""Layers by the names of the modes equal one process, on the meshes of their modes, and reject others."""

from typing import Any

import pytest
import torch
from parallel_layers import GRIDS, check_gradients, draw, on_grid, redraw
from torch import distributed as dist

from colossal import comm
from colossal._src.nn.layer.patch import Patches
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, MeshError
from colossal.legacy import nn as older
from colossal.legacy.nn import WrappedDropout, WrappedDropPath, partition_batch
from colossal.legacy.nn import init as older_init
from colossal.nn import DropPath, gather_output, split_input
from colossal.testing import assert_close, fake_world, run_processes, run_threads

NAMES = {"1d-2": "1D", "1d-3": "1D", "2d": "2D", "2.5d": "2p5D", "3d": "3D"}
EXACT: dict[str, Any] = {"dtype": torch.float64}


def named(kind: str, grid: str) -> Any:
    return getattr(older, kind + NAMES[grid])


def full_features(length: int, mesh: ParallelMesh) -> Any:
    """Gathers what a column-parallel layer leaves sharded."""

    def gather(y: torch.Tensor) -> torch.Tensor:
        if mesh.tp_mode != "1d":
            return gather_output(y)
        return y if y.shape[-1] == length else comm.gather(y, "tp", -1, mesh, length=length)

    return gather


def check_layer(
    layer: Any, native: torch.nn.Module, x: torch.Tensor, name: str, *, features: bool | None = None, whole: Any = None
) -> None:
    """The output and all gradients equal those of the native."""
    given, wanted = (x.clone().requires_grad_(x.is_floating_point()) for _ in range(2))
    expected = native(wanted)
    weights = draw(*expected.shape, seed=7)
    (expected * weights).sum().backward()
    result = (whole or gather_output)(layer(split_input(given, features=features)))
    assert_close(result, expected.detach(), f"{name}: output")
    (result * weights).sum().backward()
    check_gradients(layer, native, name)
    if x.is_floating_point():
        assert_close(given.grad, wanted.grad, f"{name}: gradient of the input")


def check_layers(grid: str) -> None:
    with on_grid(grid) as mesh:
        for kind, sizes in (("Linear", (6, 9)), ("Linear", (9, 6)), ("VocabParallelClassifier", (6, 9))):
            native = redraw(torch.nn.Linear(*sizes, **EXACT))
            layer = named(kind, grid).from_native(native)
            check_layer(layer, native, draw(8, sizes[0]), f"{kind} on {grid}", whole=full_features(sizes[1], mesh))
        native = redraw(torch.nn.Linear(6, 5, **EXACT))
        check_layer(
            named("Classifier", grid).from_native(native),
            native,
            draw(8, 6),
            f"classifier on {grid}",
            whole=lambda y: gather_output(y, features=False),
        )
        norm = redraw(torch.nn.LayerNorm(6, **EXACT))
        check_layer(named("LayerNorm", grid).from_native(norm), norm, draw(8, 2, 6), f"norm on {grid}")
        tokens = torch.randint(11, (8, 3), generator=torch.Generator().manual_seed(0))
        for kind in ("Embedding", "VocabParallelEmbedding"):
            table = redraw(torch.nn.Embedding(11, 6, **EXACT))
            check_layer(named(kind, grid).from_native(table), table, tokens, f"{kind} on {grid}")
        patches = redraw(Patches(8, 4, 3, 6, **EXACT))
        layer = named("PatchEmbedding", grid).from_native(patches)
        check_layer(layer, patches, draw(8, 3, 8, 8), f"patches on {grid}", features=False)


@pytest.mark.parametrize("grid", ["1d-2", "2d", "2.5d", "3d"])
def test_layers_of_a_mode_equal_one_process(grid) -> None:
    run_threads(check_layers, GRIDS[grid]["tp"], grid)


def check_losses(grid: str) -> None:
    logits, targets = draw(8, 6).requires_grad_(), torch.arange(8) % 6
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    expected.backward()
    with on_grid(grid) as mesh:
        for labels in (split_input(targets), targets):  # of this rank, and of all
            own = logits.detach().clone().requires_grad_()
            loss = named("CrossEntropyLoss", grid)(label_smoothing=0.1)(split_input(own, features=False), labels)
            loss.backward()
            assert_close(loss, expected.detach(), "loss")
            assert_close(own.grad, logits.grad, "gradient of logits")
            sharded = logits.detach().clone().requires_grad_()
            local = split_input(sharded)
            local = comm.scatter(local, "tp", -1, mesh) if mesh.tp_mode == "1d" else local
            loss = named("VocabParallelCrossEntropyLoss", grid)(label_smoothing=0.1)(local, labels)
            loss.backward()
            assert_close(loss, expected.detach().float().to(loss.dtype), "loss of sharded classes", rtol=1e-5)
            assert_close(sharded.grad, logits.grad, "gradient of sharded logits", rtol=1e-5, atol=1e-7)
            right = named("Accuracy", grid)()(split_input(logits.detach(), features=False), labels)
            assert right == (logits.argmax(-1) == targets).sum()
        per_token = named("CrossEntropyLoss", grid)(False)(split_input(logits.detach(), features=False), targets)
        assert per_token.shape == split_input(targets).shape


@pytest.mark.parametrize("grid", ["1d-2", "2d", "2.5d", "3d"])
def test_losses_and_accuracies_of_a_mode_equal_one_process(grid) -> None:
    run_threads(check_losses, GRIDS[grid]["tp"], grid)


def kinds_with_a_mode() -> list[str]:
    return [name for name in dir(older) if name.endswith(("1D", "2D", "2p5D", "3D"))]


SIZES: dict[str, tuple[Any, ...]] = {
    "Linear": (4, 8),
    "Classifier": (4, 8),
    "VocabParallelClassifier": (4, 8),
    "LayerNorm": (4,),
    "Embedding": (8, 4),
    "VocabParallelEmbedding": (8, 4),
    "PatchEmbedding": (8, 4, 3, 8),
}


def test_all_names_of_modes_are_there() -> None:
    from colossal._src.legacy import nn as implementation

    expected = {kind + mode for kind in SIZES for mode in ("1D", "2D", "2p5D", "3D")}
    losses = ("CrossEntropyLoss", "VocabParallelCrossEntropyLoss", "Accuracy")
    expected |= {kind + mode for kind in losses for mode in ("1D", "2D", "2p5D", "3D")} | {"Dropout1D"}
    assert {name for name in implementation.__all__ if name.endswith("D")} == expected


@pytest.mark.parametrize("kind", [*SIZES, "CrossEntropyLoss", "VocabParallelCrossEntropyLoss", "Accuracy"])
def test_a_mesh_of_another_mode_is_rejected(kind) -> None:
    sizes = SIZES.get(kind, ())
    with fake_world(8):
        for grid, other in (("2d", "1d-2"), ("1d-2", "3d"), ("2.5d", "3d"), ("3d", "2.5d")):
            with on_grid(other), pytest.raises(MeshError, match="needs a tp axis that is arranged as"):
                named(kind, grid)(*sizes)
        with pytest.raises(MeshError, match="needs a tp axis that is arranged as 2d"):
            named(kind, "2d")(*sizes)


def test_arguments_come_in_their_older_order() -> None:
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"):
        norm = older.LayerNorm2D(8, 1e-3, False, torch.float64)
        assert (norm.eps, norm.bias, norm.weight.dtype) == (1e-3, None, torch.float64)
        linear = older.Linear2D(8, 4, False, torch.float64, True)
        assert (linear.bias, linear.skip_bias_add) == (None, True)
        table = older.Embedding2D(8, 4, 0, torch.float64, older_init.ones_())
        assert table.weight.sum() == 7 * 2 / 2  # all rows but that of padding, half of the features, of which half
        head = older.Classifier2D(8, 4, None, True, torch.float64, older_init.ones_(), older_init.zeros_())
        assert head.bias.abs().sum() == 0
        assert head.weight.min() == 1
        patches = older.PatchEmbedding2D(8, 4, 3, 8, True, None, older_init.ones_(), older_init.zeros_())
        assert patches.weight.min() == 1
    with fake_world(8), ParallelMesh(tp=8, tp_mode="3d"):
        assert older.LayerNorm3D(8).eps == 1e-12
    with fake_world(2), ParallelMesh(tp=2):
        assert older.Linear1D(4, 8, True, None, True)(torch.ones(2, 4)).shape == (2, 8)
        dropped = older.Dropout1D(0.5)(torch.ones(1000))
        assert dropped.unique().tolist() == [0.0, 2.0]


def test_vanilla_layers_are_those_of_one_rank() -> None:
    layers = {
        "VanillaLinear": (4, 8, False, torch.float64, True),
        "VanillaClassifier": (4, 8, None, False, torch.float64),
        "VanillaLayerNorm": (4, 1e-3, False, torch.float64),
        "VanillaPatchEmbedding": (8, 4, 3, 8, True, torch.float64),
    }
    for name, arguments in layers.items():
        layer = getattr(older, name)(*arguments)
        assert all(parameter.dtype == torch.float64 for parameter in layer.parameters())
        assert name == "VanillaPatchEmbedding" or layer.bias is None
        with fake_world(4), ParallelMesh():
            assert getattr(older, name)(*arguments).mesh is None


def draw_vanilla() -> Any:
    torch.manual_seed(dist.get_rank())
    with ParallelMesh(tp=2):
        layer = older.VanillaClassifier(4, 8)
    assert layer.mesh is None
    return layer.weight.detach()


def test_a_vanilla_layer_is_full_and_the_same_on_all_ranks_of_tp() -> None:
    first, second = run_processes(draw_vanilla, 2)
    assert first.shape == (8, 4)
    assert torch.equal(first, second)


def check_batches() -> None:
    batch = {"x": torch.arange(8.0).view(4, 2), "names": ["a"], "pair": (torch.arange(4), 1)}
    with ParallelMesh(tp=4, tp_mode="2d") as mesh:
        part = partition_batch(batch)
        first = 2 * mesh.rank("row")
        assert part["x"].tolist() == batch["x"][first : first + 2].tolist()
        assert part["pair"][0].tolist() == [first, first + 1]
        assert (part["names"], part["pair"][1]) == (["a"], 1)
    with ParallelMesh(tp=4):
        assert partition_batch(batch["x"]) is batch["x"]


def test_a_batch_is_partitioned_by_the_mode() -> None:
    run_threads(check_batches, 4)


def dropped_rows(grid: str) -> list[tuple[int, list[bool]]]:
    with on_grid(grid) as mesh:
        torch.manual_seed(0)
        features, tokens = (("tp",), 0) if mesh.tp_mode == "1d" else (("col",), mesh.rank("row"))
        drop = DropPath(0.5)
        x = torch.ones(64, 2, 3)
        rows = drop(x)
        assert set(rows.flatten().tolist()) == {0.0, 2.0}
        assert torch.equal(rows, rows[:, :1, :1].expand_as(rows))
        assert torch.equal(drop.eval()(x), x)
        assert mesh.ranks(*features)
        return tokens, (rows[:, 0, 0] == 0).tolist()


def test_paths_are_dropped_for_a_sample_on_all_its_ranks() -> None:
    for grid, num_groups in (("1d-2", 1), ("2d", 2)):
        found = run_processes(dropped_rows, GRIDS[grid]["tp"], grid)  # threads would share one random generator
        by_tokens = {tokens: {tuple(rows) for other, rows in found if other == tokens} for tokens, _ in found}
        assert len(by_tokens) == num_groups
        assert all(len(masks) == 1 for masks in by_tokens.values())
        assert len(set.union(*by_tokens.values())) == num_groups  # other samples, other masks


def test_a_drop_has_a_probability() -> None:
    assert DropPath(None)(torch.ones(2)).tolist() == [1.0, 1.0]
    assert DropPath(1.0)(torch.ones(2)).tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match="The probability of a drop is between 0 and 1"):
        DropPath(1.5)


def test_dropout_draws_from_the_generator_of_a_mode() -> None:
    from colossal.legacy.context import ParallelMode
    from colossal.legacy.context.random import add_seed

    with fake_world(1), ParallelMesh():
        masks = []
        for kind in (WrappedDropout, WrappedDropPath):
            for _ in range(2):
                add_seed(ParallelMode.DATA, 5, overwrite=True)
                torch.manual_seed(len(masks))  # of the generator that is not used
                masks.append(kind(0.5, mode=ParallelMode.DATA)(torch.ones(100)))
        assert torch.equal(masks[0], masks[1])
        assert torch.equal(masks[2], masks[3])
        assert not torch.equal(WrappedDropout(0.5)(torch.ones(100)), masks[0])
