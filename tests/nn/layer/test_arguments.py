# pyright: reportArgumentType=false, reportCallIssue=false
"""Arguments of layers in their documented order; others that Python would take in silence are refused; initializers."""

from typing import Any

import pytest
import torch
from parallel_layers import GRIDS, check_layer, draw, on_grid, redraw

from colossal import nn
from colossal._src.nn.layer import ParallelLayer
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, UnsupportedError
from colossal.testing import assert_close, fake_world, run_threads

HALF = torch.float16

# ------------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LayerNorm(8, 1e-5, HALF),
        lambda: nn.RMSNorm(8, 1e-5, HALF),
        lambda: nn.Linear(8, 8, True, HALF),
        lambda: nn.Classifier(8, 8, None, True, HALF),
        lambda: nn.VocabParallelClassifier(8, 8, None, True, HALF),
        lambda: nn.Embedding(8, 8, None, HALF),
        lambda: nn.VocabParallelEmbedding(8, 8, None, HALF),
        lambda: nn.PatchEmbedding(8, 4, 1, 8, True, HALF),
    ],
)
def test_the_dtype_stands_where_it_is_documented(layer) -> None:
    assert {parameter.dtype for parameter in layer().parameters()} == {HALF}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.LayerNorm(8, 1e-5, True), "dtype of LayerNorm .* Found True .* elementwise_affine=... or bias="),
        (lambda: nn.LayerNorm(8, 1e-5, False), "dtype of LayerNorm .* Found False .* elementwise_affine="),
        (lambda: nn.RMSNorm(8, 1e-5, False), "dtype of RMSNorm .* Found False .* elementwise_affine="),
        (lambda: nn.LayerNorm(8, bias=HALF), "bias of LayerNorm is True or False. Found torch.float16 .* dtype="),
        (lambda: nn.Linear(8, 8, HALF), "bias of Linear is True or False. Found torch.float16 .* dtype="),
        (lambda: nn.Linear(8, 8, True, None, False), "device of Linear .* Found False .* skip_bias_add="),
        (lambda: nn.Linear(8, 8, True, "cpu"), "dtype of Linear .* Found 'cpu' .* device="),
        (lambda: nn.Linear(8, 8, True, None, torch.nn.init.ones_), "device of Linear .* weight_initializer="),
        (lambda: nn.Classifier(8, 8, None, HALF), "bias of Classifier .* Found torch.float16 .* dtype="),
        (lambda: nn.Embedding(8, 8, None, None, torch.nn.init.ones_), "device of Embedding .* weight_initializer="),
        (lambda: nn.Embedding(8, 8, None, None, True), "device of Embedding .* Found True .* Leave it out"),
        (lambda: nn.PatchEmbedding(8, 4, 1, 8, HALF), "flatten of PatchEmbedding .* Found torch.float16 .* dtype="),
        (lambda: nn.VocabParallelCrossEntropyLoss(True), "ignore_index .* Found True, .* reduction="),
    ],
)
def test_what_belongs_to_another_argument_is_refused(layer, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layer()


# -------------------------------------------------------------------------------------------------- gather_output


def check_gathered(name: str) -> None:
    with on_grid(name):
        for sizes in ((8, 12), (5, 7), (12, 8), (7, 3)):
            native = redraw(torch.nn.Linear(*sizes, dtype=torch.float64))
            layer = nn.Linear.from_native(native, gather_output=True)
            case = f"gathered {sizes} on {name}"
            check_layer(layer, native, draw(4, sizes[0]), case, whole=lambda y: y)
            beside = nn.Linear.from_native(native, gather_output=True, skip_bias_add=True)
            product, bias = beside(draw(4, sizes[0]))
            (product + bias).square().sum().backward()
            expected = native(draw(4, sizes[0]))
            native.zero_grad()
            expected.square().sum().backward()
            assert_close((product + bias).detach(), expected.detach(), case)
            plain = nn.Linear.from_native(native, gather_output=True)
            plain(draw(4, sizes[0])).square().sum().backward()
            for key, parameter in plain.named_parameters():
                assert_close(beside.get_parameter(key).grad, parameter.grad, f"{case}: gradient of {key}")
        native = redraw(torch.nn.Linear(6, 12, dtype=torch.float64))
        layer = nn.Linear.from_native(native, split_sizes=(7, 2, 3), gather_output=True)
        check_layer(layer, native, draw(4, 6), f"packed on {name}", whole=lambda y: y)


@pytest.mark.parametrize("name", ["1d-2", "1d-3"])
def test_a_gathered_linear_layer_is_that_of_one_process(name) -> None:
    run_threads(check_gathered, GRIDS[name]["tp"], name)


def test_one_process_gathers_nothing() -> None:
    for layer in (nn.Linear(4, 6, gather_output=True), nn.VocabParallelClassifier(4, 6, gather_output=True)):
        assert layer(torch.ones(2, 4)).shape == (2, 6)


@pytest.mark.parametrize("name", ["2d", "2.5d", "3d"])
def test_grids_leave_activations_in_parts(name) -> None:
    with fake_world(GRIDS[name]["tp"]), on_grid(name):
        for kind in (nn.Linear, nn.VocabParallelClassifier):
            with pytest.raises(UnsupportedError, match=r"arranged as 1d. Found .* colossal.nn.gather_output"):
                kind(8, 8, gather_output=True)


# --------------------------------------------------------------------------------------------------- initializers


def by_name(tensor: torch.Tensor, fan_in: int | None = None, fan_out: int | None = None) -> torch.Tensor:
    assert fan_in is not None
    assert fan_out is not None
    return tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000.0 * fan_in + 100.0 * fan_out)


def by_place(tensor: torch.Tensor, before: int, behind: int, /) -> None:
    by_name(tensor, before, behind)


def drawn(tensor: torch.Tensor, *, fan_in: int) -> None:
    torch.nn.init.normal_(tensor, std=fan_in**-0.5, generator=torch.Generator().manual_seed(5))


LAYERS: dict[str, tuple[Any, tuple[int, int]]] = {
    "Linear": (lambda **fill: nn.Linear(6, 9, bias_initializer=fill["weight_initializer"], **fill), (6, 9)),
    "Row": (lambda **fill: nn.Linear(9, 6, False, **fill), (9, 6)),
    "Classifier": (lambda **fill: nn.Classifier(6, 5, None, False, **fill), (6, 5)),
    "VocabParallelClassifier": (lambda **fill: nn.VocabParallelClassifier(6, 11, None, False, **fill), (6, 11)),
    "Embedding": (lambda **fill: nn.Embedding(11, 6, 2, **fill), (11, 6)),
    "VocabParallelEmbedding": (lambda **fill: nn.VocabParallelEmbedding(11, 6, 2, **fill), (11, 6)),
    "PatchEmbedding": (
        lambda **fill: nn.PatchEmbedding(
            8, 4, 3, 6, position_embed_initializer=by_name, bias_initializer=by_place, **fill
        ),
        (3 * 16, 6 * 16),
    ),
}


def filled(make: Any, fill: Any) -> dict[str, torch.Tensor]:
    layer = make(weight_initializer=fill)
    assert isinstance(layer, ParallelLayer)
    return {name: layer.full_parameter(name) for name in layer.layouts}


def check_initializers(name: str, expected: dict[Any, dict[str, torch.Tensor]]) -> None:
    with on_grid(name):
        for (kind, fill), wholes in expected.items():
            for key, own in filled(LAYERS[kind][0], fill).items():
                assert torch.equal(own, wholes[key]), f"{kind}.{key} by {fill} on {name}"


@pytest.mark.parametrize("name", GRIDS)
def test_initializers_fill_full_tensors_with_full_fans(name) -> None:
    expected = {(kind, fill): filled(LAYERS[kind][0], fill) for kind in LAYERS for fill in (by_name, by_place, drawn)}
    for (kind, fill), wholes in expected.items():
        weight, fans = wholes["weight"], LAYERS[kind][1]
        if fill is not drawn:
            assert weight.flatten()[0] == 1000.0 * fans[0] + 100.0 * fans[1]
        if "Embedding" in kind and "Patch" not in kind:
            assert not weight[2].any(), "the row of padding stays zero"
    run_threads(check_initializers, GRIDS[name]["tp"], name, expected)


def test_initializers_of_the_tensor_alone_keep_their_defaults() -> None:
    torch.manual_seed(0)
    weight = nn.Linear(100, 100, weight_initializer=torch.nn.init.normal_).weight
    assert abs(weight.mean().item()) < 0.1  # the second and third arguments of normal_ are no fans
    assert not nn.Linear(4, 4, weight_initializer=torch.Tensor.zero_).weight.any()


def test_an_initializer_of_other_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor, fan_in and fan_out. Found one that requires tensor, std. Bind"):
        nn.Linear(4, 4, weight_initializer=lambda tensor, std: tensor * std)


def test_accuracies_of_uneven_batches_add_up() -> None:
    """What a hook does with the documented count."""
    count = nn.Accuracy()
    logits = torch.eye(4)
    first, second = count(logits[:3], torch.tensor([0, 1, 1])), count(logits[3:], torch.tensor([3]))
    assert not first.is_floating_point()
    assert (int(first), int(second)) == (2, 1)
    assert (first + second).item() / 4 == 0.75
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"):
        assert nn.Accuracy().mesh is not None
