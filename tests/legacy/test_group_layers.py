# pyright: reportArgumentType=false, reportCallIssue=false
"""Layers of a process group, made of serial modules by their documented names, equal one process."""

import copy
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_layers import draw, redraw
from torch import distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, MeshError, UnsupportedError
from colossal.lazy import LazyInitContext
from colossal.legacy.cluster import ProcessGroupMesh
from colossal.legacy.d_tensor import (
    get_global_shape,
    get_shard_dim_1d,
    get_sharding_spec,
    is_distributed_tensor,
    to_global,
)
from colossal.shardformer import ShardConfig
from colossal.testing import assert_close, fake_world, run_processes, run_threads

layers: Any = importlib.import_module("colossal.shardformer.layer")
EXACT: dict[str, Any] = {"dtype": torch.float64}
TOKENS = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(0))


def natives() -> dict[str, tuple[nn.Module, dict[str, Any], torch.Tensor]]:
    """The serial module of each layer, its options, and an input."""
    x = draw(2, 4, 6)
    packed = redraw(nn.Linear(6, 12, **EXACT))
    conv = redraw(Conv1D(12, 6).double())
    return {
        "Linear1D_Col": (redraw(nn.Linear(6, 9, **EXACT)), {"gather_output": True}, x),
        "Linear1D_Row": (redraw(nn.Linear(6, 9, **EXACT)), {"parallel_input": False}, x),
        "FusedLinear1D_Col": (packed, {"gather_output": True, "n_fused": 3}, x),
        "FusedLinear1D_Row": (packed, {"parallel_input": False}, x),
        "GPT2FusedLinearConv1D_Col": (conv, {"gather_output": True, "split_sizes": [4, 4, 4]}, x),
        "GPT2FusedLinearConv1D_Row": (conv, {"parallel_input": False}, x),
        "VocabParallelLMHead1D": (redraw(nn.Linear(6, 11, bias=False, **EXACT)), {"gather_output": True}, x),
        "Embedding1D": (redraw(nn.Embedding(11, 6, padding_idx=2, **EXACT)), {}, TOKENS),
        "VocabParallelEmbedding1D": (redraw(nn.Embedding(11, 6, **EXACT)), {}, TOKENS),
        "LinearWithGradAccum": (redraw(nn.Linear(6, 9, **EXACT)), {"use_zbv": True}, x),
        "GPT2FusedLinearConv1D": (conv, {}, x),
        "PaddingEmbedding": (redraw(nn.Embedding(11, 6, **EXACT)), {}, TOKENS),
        "PaddingLMHead": (redraw(nn.Linear(6, 11, **EXACT)), {}, x),
        "FusedLayerNorm": (redraw(nn.LayerNorm(6, **EXACT)), {}, x),
        "FusedRMSNorm": (redraw(nn.RMSNorm(6, **EXACT)), {}, x),
    }


def check_equals_native(name: str, lazily: bool = False) -> None:
    native, options, x = natives()[name]
    given = copy.deepcopy(native)
    if lazily:
        torch.manual_seed(0)
        with LazyInitContext():
            given = nn.Linear(6, 9, **EXACT)
    layer = getattr(layers, name).from_native_module(given, process_group=None, **options)
    for key, parameter in layer.named_parameters():
        assert given.get_parameter(key) is parameter, f"{name} leaves its shard of {key} to the module"
    before = {key: value.clone() for key, value in native.state_dict().items()}
    native.load_state_dict(layer.state_dict())
    layer.load_state_dict(native.state_dict())
    assert lazily or all(torch.equal(value, before[key]) for key, value in native.state_dict().items())
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    expected, output = native(inputs[0]), layer(inputs[1])
    assert_close(output, expected.detach(), f"{name}: output")
    weights = draw(*expected.shape, seed=5)
    (expected * weights).sum().backward()
    (output * weights).sum().backward()
    for key, parameter in native.named_parameters():
        assert parameter.grad is not None
        layer.get_parameter(key).data.copy_(layer.get_parameter(key).grad)
        assert_close(layer.state_dict()[key], parameter.grad, f"{name}: gradient of {key}")
    if x.is_floating_point():
        assert_close(inputs[1].grad, inputs[0].grad, f"{name}: gradient of the input")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", natives())
def test_a_layer_equals_the_module_that_it_is_made_from(name: str, size: int) -> None:
    run_threads(check_equals_native, size, name)


@pytest.mark.parametrize("name", ["Linear1D_Col", "Linear1D_Row"])
def test_a_lazy_module_gives_each_rank_its_shard(name: str) -> None:
    run_processes(check_equals_native, 2, name, lazily=True)


def check_sharded_tokens(column: str, row: str, options: dict[str, Any]) -> None:
    is_conv = column.startswith("GPT2")
    first = redraw(Conv1D(8, 6).double() if is_conv else nn.Linear(6, 8, **EXACT))
    second = redraw(Conv1D(6, 8).double() if is_conv else nn.Linear(8, 6, **EXACT))
    up = getattr(layers, column).from_native_module(copy.deepcopy(first), None, **options)
    down = getattr(layers, row).from_native_module(copy.deepcopy(second), None, **options)
    wanted, weights = draw(2, 4, 6).requires_grad_(), draw(2, 4, 6, seed=9)
    given, own = (each.detach().chunk(2, 1)[dist.get_rank()].clone() for each in (wanted, weights))
    given.requires_grad_()
    expected, output = second(first(wanted)), down(up(given))
    assert_close(output, expected.detach().chunk(2, 1)[dist.get_rank()], f"{options}: output")
    (expected * weights).sum().backward()
    (output * own).sum().backward()
    assert wanted.grad is not None
    assert_close(given.grad, wanted.grad.chunk(2, 1)[dist.get_rank()], f"{options}: input")
    for native, layer in ((first, up), (second, down)):
        for key, parameter in native.named_parameters():
            layer.get_parameter(key).data.copy_(layer.get_parameter(key).grad)
            assert_close(layer.state_dict()[key], parameter.grad, f"{options}: gradient of {key}")


def shard_tokens() -> None:
    for options in ({"seq_parallel_mode": "split_gather"}, {"seq_parallel_mode": "ring"}, {"seq_parallel": True}):
        check_sharded_tokens("Linear1D_Col", "Linear1D_Row", options)
    check_sharded_tokens("Linear1D_Col", "Linear1D_Row", {"seq_parallel_mode": "split_gather", "overlap": True})
    options = {"seq_parallel_mode": "split_gather"}
    check_sharded_tokens("GPT2FusedLinearConv1D_Col", "GPT2FusedLinearConv1D_Row", options)
    native = redraw(nn.Linear(6, 8, **EXACT))
    gathering = {"gather_output": True, "seq_parallel_mode": "ring"}
    layer = layers.Linear1D_Col.from_native_module(copy.deepcopy(native), None, **gathering)
    assert_close(layer(draw(2, 4, 6).chunk(2, 1)[dist.get_rank()]), native(draw(2, 4, 6)).detach(), "output of a ring")


def test_sharded_tokens_are_gathered_and_scattered() -> None:
    run_processes(shard_tokens, 2)


def test_a_layer_is_sharded_over_any_group() -> None:
    def program() -> Any:
        grid = ProcessGroupMesh(2, 2)
        shapes = []
        for axis in (0, 1):
            group = grid.get_group_along_axis(axis)
            native = redraw(nn.Linear(6, 8, **EXACT))
            layer = layers.Linear1D_Col.from_native_module(copy.deepcopy(native), group, gather_output=True)
            assert_close(layer(draw(2, 6)), native(draw(2, 6)).detach(), f"axis {axis}")
            shapes.append((tuple(layer.weight.shape), layer.mesh.ranks("tp")))
        with ParallelMesh(tp=2) as mesh:
            assert layers.Linear1D_Row(6, 8, process_group=[mesh.group("tp")]).mesh is mesh
            assert layers.Linear1D_Row(6, 8).mesh is mesh, "the tp axis of the ambient mesh"
        streamed = layers.Linear1D_Row(8, 8, stream_chunk_num=4)
        streamed.chunk_weight()
        assert streamed.weight.shape == (8, 2), "all ranks"
        return shapes

    assert run_threads(program, 4)[1] == [((4, 6), (1, 3)), ((4, 6), (0, 1))]


def test_shards_are_distributed_tensors() -> None:
    def program() -> None:
        native = redraw(nn.Linear(6, 9, **EXACT))
        full = native.weight.detach().clone()
        layer = layers.Linear1D_Col.from_native_module(native, None)
        assert is_distributed_tensor(layer.weight)
        assert get_sharding_spec(layer.weight).dim_partition_dict == {0: [0]}
        assert get_shard_dim_1d(layer.weight) == 0
        assert get_global_shape(layer.weight) == (9, 6)
        assert torch.equal(to_global(layer.weight), full)
        assert not is_distributed_tensor(layers.Linear1D_Row(6, 9, process_group=None).bias)

    run_threads(program, 2)


def test_features_of_an_embedding_may_stay_sharded() -> None:
    def program() -> torch.Tensor:
        table = redraw(nn.Embedding(11, 6, **EXACT))
        return layers.Embedding1D.from_native_module(table, None, gather_output=False)(TOKENS).detach()

    full = redraw(nn.Embedding(11, 6, **EXACT))(TOKENS).detach()
    assert torch.equal(torch.cat(run_threads(program, 2), -1), full)


def draw_masks() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.ones(4, 64)
    kinds = (layers.DropoutForParallelInput, layers.DropoutForReplicatedInput)
    made = [kind.from_native_module(nn.Dropout(0.3), process_group=None) for kind in kinds]
    assert all(layer.p == 0.3 for layer in made)
    assert torch.equal(made[0].eval()(x), x)
    return [layer.train()(x) for layer in made]


def test_masks_of_dropout_differ_where_inputs_are_sharded() -> None:
    (first, same), (second, also) = run_processes(draw_masks, 2)
    assert not torch.equal(first, second)
    assert torch.equal(same, also)


def test_gradients_of_a_norm_are_summed_over_sharded_tokens() -> None:
    def program() -> None:
        native = redraw(nn.LayerNorm(6, **EXACT))
        norm = layers.LayerNorm.from_native_module(copy.deepcopy(native), sp_partial_derived=True)
        x = draw(2, 4, 6)
        native(x).square().sum().backward()
        norm(x.chunk(2, 1)[dist.get_rank()]).square().sum().backward()
        for key, parameter in native.named_parameters():
            assert_close(norm.get_parameter(key).grad, parameter.grad, key)

    run_threads(program, 2)


def save_sharded(path: str) -> None:
    native = nn.Sequential(redraw(nn.Linear(6, 8)), redraw(nn.Linear(8, 6)))
    model = copy.deepcopy(native)
    with ParallelMesh(tp=2):
        model[0] = layers.Linear1D_Col.from_native_module(model[0], None)
        model[1] = layers.Linear1D_Row.from_native_module(model[1], None)
        booster = Booster(plugin=TorchDDPPlugin())
        booster.save_model(booster.boost(model)[0], path)
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    booster.load_model(other, path)
    for key, parameter in native.named_parameters():
        assert torch.equal(other.get_parameter(key), parameter), key


def test_a_model_of_such_layers_is_saved_by_a_booster(tmp_path: Path) -> None:
    run_processes(save_sharded, 2, str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Linear1D_Col", {"fp8_communication": True}, "fp8_communication=True. Leave it out"),
        ("Linear1D_Col", {"seq_parallel_mode": "all_to_all"}, "'split_gather' and 'ring'"),
        ("Linear1D_Row", {"seq_parallel_mode": "ring", "seq_parallel_dim": 0}, "Pass seq_parallel_mode='split_gather'"),
        ("Linear1D_Col", {"process_group": []}, "Found 0. Pass one"),
        ("VocabParallelLMHead1D", {"make_vocab_size_divisible_by": 128}, "resize_token_embeddings"),
        ("LinearWithGradAccum", {"seq_parallel_mode": "ring"}, "use Linear1D_Col"),
        ("PaddingLMHead", {"make_vocab_size_divisible_by": 3}, "Nothing is padded"),
    ],
)
def test_what_cannot_be_honored_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match=message):
        getattr(layers, name).from_native_module(nn.Linear(4, 6), **options)


def test_other_modules_are_refused() -> None:
    with fake_world(2):
        for name in ("DropoutForParallelInput", "LinearWithGradAccum", "PaddingEmbedding", "Linear1D_Row"):
            with pytest.raises(ConfigError, match="Found Conv2d. Pass such a module"):
                getattr(layers, name).from_native_module(nn.Conv2d(2, 2, 1))
        with pytest.raises(UnsupportedError, match="Found Conv2d. Leave it"):
            layers.FusedRMSNorm.from_native_module(nn.Conv2d(2, 2, 1))


def test_a_group_is_needed() -> None:
    with pytest.raises(MeshError, match="Found no process group"):
        layers.Linear1D_Col.from_native_module(nn.Linear(2, 2))


def test_a_configuration_of_sharding_takes_a_group() -> None:
    with fake_world(4):
        group = ProcessGroupMesh(2, 2).get_group_along_axis(1)
        config = ShardConfig(tensor_parallel_process_group=group, enable_flash_attention=True)
        assert config.mesh is not None and config.mesh.shape["tp"] == 2  # noqa: PT018
        assert config.enable_flash_attention
        assert replace(config, parallel_output=False).mesh is config.mesh
