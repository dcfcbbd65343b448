"""The same model on every mesh: shapes, whole weights, training in single and half precision, dropout, conversions."""

import copy
from typing import Any

import pytest
import torch
from parallel_layers import GRIDS, SMALL_GRIDS, draw, on_grid
from torch.utils.checkpoint import checkpoint

from colossal import nn
from colossal._src.nn.layer import ParallelLayer
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, MeshError, ShapeError, UnsupportedError
from colossal.testing import assert_close, fake_world, run_processes, run_threads


class MLP(torch.nn.Module):
    """The model of the tutorials."""

    def __init__(self, dim: int = 32, classes: int = 10, p: float = 0.0) -> None:
        super().__init__()
        self.table = nn.VocabParallelEmbedding(17, dim)
        self.norm = nn.LayerNorm(dim)
        self.dense_1 = nn.Linear(dim, 4 * dim)
        self.activation = torch.nn.GELU()
        self.dense_2 = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(p)
        self.last = nn.RMSNorm(dim)
        self.head = nn.VocabParallelClassifier(dim, 17, bias=False, weight=self.table.weight)
        self.classify = nn.Classifier(dim, classes)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(tokens)
        x = x + self.dropout(self.dense_2(self.activation(self.dense_1(self.norm(x)))))
        x = self.last(x)
        return self.head(x), self.classify(x)


def train(steps: int = 3, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses and accuracies of some steps, and the whole weights afterwards."""
    torch.manual_seed(3)
    model = MLP().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    words, classes = nn.VocabParallelCrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)
    accuracy = nn.Accuracy(vocab_parallel=True)
    generator = torch.Generator().manual_seed(5)
    losses, found = [], []
    for _ in range(steps):
        tokens = torch.randint(17, (8, 4), generator=generator)
        labels = torch.randint(10, (8, 4), generator=generator)
        tokens, labels = nn.split_input(tokens), nn.split_input(labels)
        logits, others = model(tokens)
        loss = words(logits, tokens) + classes(others.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        found.append(accuracy(logits, tokens).item())
    wholes = {
        f"{prefix}.{name}": module.full_parameter(name).clone()
        for prefix, module in model.named_modules()
        if isinstance(module, ParallelLayer)
        for name in module.layouts
    }
    return losses, found, wholes


def train_on(name: str, dtype: torch.dtype) -> tuple[list[float], list[float], dict[str, Any]]:
    with on_grid(name):
        return train(dtype=dtype)


@pytest.mark.parametrize("name", GRIDS)
def test_training_equals_that_of_one_process(name) -> None:
    losses, accuracies, wholes = train()
    for found in run_processes(train_on, GRIDS[name]["tp"], name, torch.float32):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(accuracies)
        assert found[2].keys() == wholes.keys()
        for key, whole in wholes.items():
            assert_close(found[2][key], whole, key)


@pytest.mark.parametrize("name", SMALL_GRIDS)
def test_training_in_bfloat16(name) -> None:
    """8 bits of mantissa, rounded at each operation, in another order."""
    losses, _, _ = train(dtype=torch.bfloat16)
    for found in run_processes(train_on, GRIDS[name]["tp"], name, torch.bfloat16):
        assert found[0] == pytest.approx(losses, rel=3e-2)


def wholes_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every whole parameter, and every whole gradient, in float64."""
    found = {}
    for prefix, layer in model.named_modules():
        if isinstance(layer, ParallelLayer):
            for name in layer.layouts:
                parameter = layer.get_parameter(name)
                assert parameter.grad is not None
                found[f"{prefix}.{name}"] = layer.full_parameter(name).double()
                own, parameter.data = parameter.data, parameter.grad
                found[f"gradient of {prefix}.{name}"] = layer.full_parameter(name).double()
                parameter.data = own
    return found


def exact_steps(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The outputs, whole parameters and gradients of three steps, from the same weights in any precision."""
    torch.manual_seed(3)
    model = MLP().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    found = {}
    for step in range(3):
        tokens = torch.randint(17, (8, 4), generator=torch.Generator().manual_seed(step))
        own = nn.split_input(tokens)
        logits, others = model(own)
        loss = nn.VocabParallelCrossEntropyLoss()(logits, own) + nn.CrossEntropyLoss()(others, own % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found |= {f"{name}, step {step}": value.clone() for name, value in wholes_of(model).items()}
        found[f"loss, step {step}"] = loss.detach().double()
        found[f"output, step {step}"] = nn.gather_output(others.detach(), features=False).double()
    return found


def exact_steps_on(name: str) -> dict[str, torch.Tensor]:
    with on_grid(name):
        return exact_steps(torch.float32)


@pytest.mark.parametrize("name", SMALL_GRIDS)
def test_float32_on_a_mesh_is_close_to_float64_in_one_process(name) -> None:
    """To 1e-5 of each tensor's norm: outputs, all gradients, and parameters after each of three steps."""
    expected = exact_steps(torch.float64)
    for found in run_processes(exact_steps_on, GRIDS[name]["tp"], name):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).norm() <= 1e-5 * value.norm(), key


# ------------------------------------------------------------------------------------------------- initial weights


def whole_weights(name: str) -> list[torch.Tensor]:
    torch.manual_seed(7 if name.startswith("3d") else torch.distributed.get_rank())  # ranks may be seeded differently
    with on_grid(name):
        model = MLP()
        return [model.table.full_parameter("weight"), model.dense_1.full_parameter("weight"), torch.rand(1)]


@pytest.mark.parametrize("name", GRIDS)
def test_the_initial_weights_are_those_of_one_process(name) -> None:
    found = run_processes(whole_weights, GRIDS[name]["tp"], name)
    torch.manual_seed(7 if name.startswith("3d") else 0)
    model = MLP()
    expected = [model.table.weight, model.dense_1.weight, torch.rand(1)]
    for wholes in found:
        for own, whole in zip(wholes, expected, strict=True):
            assert torch.equal(own, whole)


def test_initializers_fill_the_whole_weight() -> None:
    with fake_world(4, rank=3), ParallelMesh(tp=4, tp_mode="2d"):
        layer = nn.Linear(
            4,
            8,
            weight_initializer=lambda w: w.copy_(torch.arange(32.0).view(8, 4)),
            bias_initializer=torch.nn.init.ones_,
        )
        assert layer.weight.tolist() == torch.arange(32.0).view(8, 4)[4:, 2:].tolist()
        assert layer.bias is not None
        assert layer.bias.tolist() == [1.0] * 4


# ------------------------------------------------------------------------------------------------------ the shapes

SHAPES = {
    "1d-2": [(512, 256), (256, 512), (16, 256), (16, 512), (16, 256)],
    "2d": [(512, 128), (128, 512), (8, 128), (8, 512), (8, 128)],
    "2.5d": [(512, 128), (128, 512), (4, 128), (4, 512), (4, 128)],
    "3d": [(256, 128), (64, 512), (4, 128), (4, 512), (4, 128)],
}
"""Both weights, the input, and both outputs, as the tutorials have them; a weight is (out, in)."""


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_tutorials(name) -> None:
    with fake_world(GRIDS[name]["tp"]), on_grid(name):
        first, second = nn.Linear(256, 1024), nn.Linear(1024, 256)
        x = nn.split_input(torch.zeros(16, 256))
        hidden = first(x)
        found = [first.weight, second.weight, x, hidden, second(hidden)]
        assert [tuple(tensor.shape) for tensor in found] == SHAPES[name]


def test_without_a_mesh_layers_are_plain() -> None:
    layer = nn.Linear(4, 6)
    assert torch.equal(layer(torch.ones(2, 4)), layer.to_native()(torch.ones(2, 4)))
    assert layer.mesh is None
    with fake_world(4), ParallelMesh(dp=4):
        assert nn.Linear(4, 6).mesh is None
        x = torch.ones(2, 4)
        assert nn.split_input(x) is x
        assert nn.gather_output(x) is x


def test_a_model_can_be_copied() -> None:
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"):
        layer = nn.Linear(4, 8)
        other = copy.deepcopy(layer)
        assert other.mesh is layer.mesh
        assert torch.equal(other.weight, layer.weight)


# --------------------------------------------------------------------------------------------------------- dropout


def masks(name: str, *, parallel_input: bool) -> tuple[list[int], bool]:
    with on_grid(name):
        torch.manual_seed(torch.distributed.get_rank())
        dropout = nn.Dropout(0.5, parallel_input=parallel_input)
        x = torch.ones(8, 64, requires_grad=True)
        kept = dropout(x)
        kept.sum().backward()
        assert x.grad is not None
        same = torch.equal(x.grad, kept.detach())
        again = checkpoint(dropout, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(again.sum(), x)
        assert torch.equal(grad, again.detach())
        assert not torch.equal(again.detach(), kept.detach())
        assert torch.equal(dropout.eval()(x), x)
        return kept.detach().flatten().int().tolist(), same


@pytest.mark.parametrize(
    ("name", "parallel_input", "distinct"),
    [("1d-2", False, 1), ("1d-2", True, 2), ("2d", False, 4), ("2.5d", False, 8), ("3d", False, 8)],
)
def test_dropout_is_equal_where_activations_are_and_independent_where_they_are_cut(
    name, parallel_input, distinct
) -> None:
    found = run_processes(masks, GRIDS[name]["tp"], name, parallel_input=parallel_input)
    assert all(same for _, same in found)
    assert len({tuple(mask) for mask, _ in found}) == distinct
    for mask, _ in found:
        assert set(mask) == {0, 2}
        assert 180 < mask.count(0) < 332  # 256 of 512, and 6 standard deviations of 11.3


# ---------------------------------------------------------------------------------------------------- the way back


def round_trip(name: str) -> None:
    with on_grid(name):
        for kind, native in (
            (nn.Linear, torch.nn.Linear(5, 7)),
            (nn.LayerNorm, torch.nn.LayerNorm(6)),
            (nn.Embedding, torch.nn.Embedding(7, 5, padding_idx=2)),
            (nn.VocabParallelEmbedding, torch.nn.Embedding(7, 5, padding_idx=2)),
            (nn.Classifier, torch.nn.Linear(5, 3, bias=False)),
        ):
            for seed, parameter in enumerate(native.parameters()):
                parameter.data.copy_(draw(*parameter.shape, seed=seed))
            native.eval().requires_grad_(False)
            layer = kind.from_native(native)
            assert not layer.training
            assert not any(parameter.requires_grad for parameter in layer.parameters())
            back = layer.to_native()
            assert type(back) is type(native)
            assert str(back) == str(native)
            assert not back.training
            for key, parameter in native.state_dict().items():
                assert torch.equal(back.state_dict()[key], parameter)


@pytest.mark.parametrize("name", GRIDS)
def test_there_and_back_is_the_identity(name) -> None:
    run_threads(round_trip, GRIDS[name]["tp"], name)


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_wrong_mode_is_refused() -> None:
    with fake_world(4), ParallelMesh(tp=4):
        with pytest.raises(MeshError, match=r"arranged as 2d. Found ParallelMesh\(pp=1, dp=1, sp=1, tp=4\)"):
            nn.Linear2D(4, 4)
        with pytest.raises(MeshError, match=r"arranged as 3d"):
            nn.Linear3D(4, 4)
    with pytest.raises(MeshError, match=r"arranged as 2.5d. Found no mesh"):
        nn.Linear2p5D(4, 4)
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"), pytest.raises(MeshError, match="arranged as 1d"):
        nn.Linear1D_Col(4, 4)
    with fake_world(8), pytest.raises(MeshError, match=r"Pass tp=4 \(2 x 2\) or tp=9 \(3 x 3\)"):
        ParallelMesh(tp=8, tp_mode="2d")
    with fake_world(8), pytest.raises(MeshError, match="tp_depth"):
        ParallelMesh(tp=8, tp_mode="2.5d")


def test_a_wrong_shape_is_refused() -> None:
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"):
        with pytest.raises(ShapeError, match=r"2 features on this rank, of 4 on all. Found \(2, 4\)"):
            nn.Linear(4, 8)(torch.zeros(2, 4))
        with pytest.raises(ShapeError, match=r"normalizes 4 features, 2 of them on this rank"):
            nn.LayerNorm(4)(torch.zeros(2, 4))
        with pytest.raises(ShapeError, match=r"divisible by 2. Found split_sizes \(5, 5\)"):
            nn.Linear(4, 10, split_sizes=(5, 5))
        with pytest.raises(ShapeError, match="A tied weight must have"):
            nn.VocabParallelClassifier(4, 8, weight=nn.Embedding(8, 4).weight)
        with pytest.raises(ShapeError, match="has tokens first and features last"):
            nn.split_input(torch.zeros(2), features=True)
    with fake_world(2), ParallelMesh(tp=2):
        with pytest.raises(ShapeError, match=r"of 4 on all. .* Linear1D_Row\(parallel_input=False\)"):
            nn.Linear1D_Row(4, 8)(torch.zeros(2, 4))
        with pytest.raises(ShapeError, match="add up to its features"):
            nn.Linear(4, 8, split_sizes=(4, 5))
    with fake_world(8), ParallelMesh(tp=8, tp_mode="3d"):
        with pytest.raises(UnsupportedError, match="shards the features of a layer as one block"):
            nn.Linear(4, 12, split_sizes=(4, 4, 4))
        with pytest.raises(UnsupportedError, match="last dimension is normalized"):
            nn.LayerNorm((4, 4))
        with pytest.raises(ShapeError, match=r"images of the shape \(images, 3, 8, 8\)"):
            nn.PatchEmbedding(8, 4, 3, 8)(torch.zeros(1, 3, 8, 4))


def test_a_wrong_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="from Linear. Found Conv2d"):
        nn.Linear.from_native(torch.nn.Conv2d(1, 1, 1))
    with pytest.raises(ConfigError, match="Patches tile an image"):
        nn.PatchEmbedding(8, 3, 3, 8)
    with pytest.raises(ConfigError, match=r"between 0 and 1. Found p=1.5"):
        nn.Dropout(1.5)
    with fake_world(2), ParallelMesh(tp=2), pytest.raises(IndexError):
        nn.VocabParallelEmbedding(4, 2)(torch.tensor([-1]))
