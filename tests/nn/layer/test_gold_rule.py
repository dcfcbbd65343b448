"""Every layer on every mesh equals its native in one process: outputs, all gradients, and steps of an optimizer."""

from typing import Any

import pytest
import torch
from parallel_layers import GRIDS, SMALL_GRIDS, check_layer, draw, on_grid, redraw

from colossal import comm
from colossal._src.nn.layer.patch import Patches
from colossal.cluster import ParallelMesh
from colossal.nn import (
    Classifier,
    Embedding,
    LayerNorm,
    Linear,
    Linear1D_Col,
    Linear1D_Row,
    PatchEmbedding,
    RMSNorm,
    VocabParallelClassifier,
    VocabParallelEmbedding,
    gather_output,
)
from colossal.testing import run_threads

CASES = ((8, 12, 8), (12, 8, 5), (8, 8, 1), (5, 7, 5), (7, 3, 8), (2, 3, 1))
"""Features before and behind, and tokens; of the last ones some ranks have none."""
EXACT: dict[str, Any] = {"dtype": torch.float64}


def whole_1d(length: int, mesh: ParallelMesh) -> Any:
    """Puts the features together that a column-parallel layer left cut, where they are."""

    def gather(y: torch.Tensor) -> torch.Tensor:
        if mesh.tp_mode != "1d":
            return gather_output(y)
        return y if y.shape[-1] == length else comm.gather(y, "tp", -1, mesh, length=length)

    return gather


def check_linear(name: str) -> None:
    with on_grid(name) as mesh:
        for in_features, out_features, batch in CASES:
            for kind in (Linear, VocabParallelClassifier, Classifier):
                native = redraw(torch.nn.Linear(in_features, out_features, bias=kind is not Classifier, **EXACT))
                case = f"{kind.__name__} {in_features} -> {out_features}, {batch} on {name}"
                whole = _whole_classes if kind is Classifier else whole_1d(out_features, mesh)
                check_layer(kind.from_native(native), native, draw(batch, in_features), case, whole=whole)
        native = redraw(torch.nn.Linear(6, 4, **EXACT))
        check_layer(Classifier.from_native(native), native, draw(5, 6), f"bias on {name}", whole=_whole_classes)
        native = redraw(torch.nn.Linear(6, 9, **EXACT))
        check_layer(Linear.from_native(native), native, draw(3, 2, 6), "three dimensions", whole=whole_1d(9, mesh))


def _whole_classes(y: torch.Tensor) -> torch.Tensor:
    return gather_output(y, features=False)


@pytest.mark.parametrize("name", GRIDS)
def test_linear_layers(name) -> None:
    run_threads(check_linear, GRIDS[name]["tp"], name)


def check_norms(name: str) -> None:
    with on_grid(name):
        for length, batch in ((8, 8), (5, 5), (3, 1)):
            for kind, native in (
                (LayerNorm, torch.nn.LayerNorm(length, **EXACT)),
                (LayerNorm, torch.nn.LayerNorm(length, bias=False, **EXACT)),
                (RMSNorm, torch.nn.RMSNorm(length, eps=1e-4, **EXACT)),
                (RMSNorm, torch.nn.RMSNorm(length, **EXACT)),
            ):
                layer = kind.from_native(redraw(native))
                check_layer(layer, native, draw(batch, 2, length), f"{kind.__name__} {length}, {batch} on {name}")


@pytest.mark.parametrize("name", SMALL_GRIDS)
def test_norms(name) -> None:
    run_threads(check_norms, GRIDS[name]["tp"], name)


def check_embeddings(name: str) -> None:
    with on_grid(name):
        for number, length, batch, padding in ((16, 8, 8, None), (11, 5, 5, 1), (3, 2, 1, 0)):
            tokens = torch.randint(number, (batch, 3), generator=torch.Generator().manual_seed(batch))
            for kind in (Embedding, VocabParallelEmbedding):
                native = redraw(torch.nn.Embedding(number, length, padding, **EXACT))
                case = f"{kind.__name__} {number} x {length}, {batch}, padding {padding} on {name}"
                check_layer(kind.from_native(native), native, tokens, case)


@pytest.mark.parametrize("name", SMALL_GRIDS)
def test_embeddings(name) -> None:
    run_threads(check_embeddings, GRIDS[name]["tp"], name)


def check_patches(name: str) -> None:
    with on_grid(name):
        for size, batch in ((8, 8), (5, 5), (8, 1)):
            native = redraw(Patches(8, 4, 3, size, **EXACT))
            case = f"patches {size}, {batch} on {name}"
            check_layer(PatchEmbedding.from_native(native), native, draw(batch, 3, 8, 8), case, features=False)
        native = redraw(Patches(8, 4, 3, 8, flatten=False, **EXACT))
        layer = PatchEmbedding.from_native(native)
        maps = draw(8, 3, 8, 8)
        check_layer(layer, native, maps, f"maps on {name}", features=False, whole=_whole_maps)


def _whole_maps(y: torch.Tensor) -> torch.Tensor:
    return gather_output(y.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("name", SMALL_GRIDS)
def test_patch_embeddings(name) -> None:
    run_threads(check_patches, GRIDS[name]["tp"], name)


def check_column_and_row(name: str) -> None:
    with on_grid(name) as mesh:
        for sizes in ((8, 12), (5, 7)):
            native = redraw(torch.nn.Linear(*sizes, **EXACT))
            layer = Linear1D_Col.from_native(native, gather_output=True)
            check_layer(layer, native, draw(4, sizes[0]), f"gathered column on {name}")
            native = redraw(torch.nn.Linear(*sizes, **EXACT))
            check_layer(Linear1D_Row.from_native(native, parallel_input=False), native, draw(4, sizes[0]), "whole row")
        for pieces in ((4, 4, 4), (7, 2, 3)):
            native = redraw(torch.nn.Linear(6, 12, **EXACT))
            layer = Linear1D_Col.from_native(native, split_sizes=pieces, gather_output=True)
            check_layer(layer, native, draw(4, 6), f"packed {pieces} on {name}")
        native = redraw(torch.nn.Linear(8, 8, **EXACT))
        product, bias = Linear1D_Row.from_native(native, skip_bias_add=True)(
            draw(4, 8).tensor_split(mesh.size("tp"), 1)[0]
        )
        assert bias is not None
        assert product.shape == (4, 8)


@pytest.mark.parametrize("name", ["1d-2"])
def test_column_and_row(name) -> None:
    run_threads(check_column_and_row, GRIDS[name]["tp"], name)
