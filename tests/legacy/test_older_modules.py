"""Modules and helpers that programs of the older API import beside the documented ones."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn

import colossal
from colossal.booster import Booster
from colossal.cluster import ParallelMesh
from colossal.errors import PlanError, ShapeError
from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor
from colossal.legacy.device import DeviceMesh
from colossal.legacy.engine import Engine
from colossal.nn import Linear1D_Col
from colossal.testing import run_threads


def older(path: str) -> Any:
    """The object that ``from MODULE import NAME`` gives."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_module_of_a_function_of_the_same_name_is_called_like_it() -> None:
    module: Any = importlib.import_module("colossal.initialize")
    moved: Any = importlib.import_module("colossal.legacy.initialize")
    assert module.launch is moved.launch is colossal.launch
    model = nn.Linear(2, 1)

    def program(of: Any) -> object:
        engine, *_ = vars(of)["initialize"](model, torch.optim.SGD(model.parameters(), lr=0.1))
        return engine

    assert vars(colossal)["initialize"] is module
    assert vars(colossal.legacy)["initialize"] is moved
    for package in (colossal, colossal.legacy):
        assert isinstance(run_threads(program, 1, package)[0], Engine)


@pytest.mark.parametrize(
    ("path", "today"),
    [
        ("colossal.booster.booster.Booster", Booster),
        ("colossal.tensor.shape_consistency.CommSpec", older("colossal.legacy.shape_consistency.CommSpec")),
        ("colossal.utils.free_port", older("colossal.legacy.testing.free_port")),
        ("colossal.utils.device.get_current_device", older("colossal.accelerator.get_current_device")),
        ("colossal.testing.random.seed_all", older("colossal.legacy.utils.set_seed")),
        ("colossal.shardformer.policies.auto_policy.Policy", older("colossal.legacy.shardformer.Policy")),
        ("colossal.booster.plugin.gemini_plugin.GeminiPlugin", older("colossal.booster.plugin.GeminiPlugin")),
    ],
)
def test_an_older_path_leads_to_what_is_there_today(path: str, today: object) -> None:
    assert older(path) is today


# ------------------------------------------------------------------------------------------ recomputation


def _make_block(*, checkpoint: bool) -> tuple[nn.Module, list[bool]]:
    """A module and the modes in which it was computed."""
    calls: list[bool] = []
    base: Any = older("colossal.nn.CheckpointModule")

    class Block(base):
        def __init__(self) -> None:
            super().__init__(checkpoint=checkpoint)
            self.inner = nn.Linear(4, 4)

        def _forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return self.inner(x).tanh() * factor

    return Block(), calls


def test_a_checkpoint_module_is_computed_again_in_training_only() -> None:
    torch.manual_seed(0)
    (block, calls), (plain, plain_calls) = _make_block(checkpoint=True), _make_block(checkpoint=False)
    plain.load_state_dict(block.state_dict())
    inputs = [torch.ones(2, 4, requires_grad=True) for _ in range(2)]
    for module, x in zip((block, plain), inputs, strict=True):
        module(x, factor=2.0).sum().backward()
    assert (calls, plain_calls) == ([False, True], [True])
    assert torch.equal(*(x.grad for x in inputs if x.grad is not None))
    for name, parameter in block.named_parameters():
        assert torch.equal(torch.as_tensor(parameter.grad), torch.as_tensor(plain.get_parameter(name).grad))
    block.eval()(inputs[0]).sum().backward()
    assert calls[2:] == [True]
    block.train()(inputs[0]).sum().backward()
    assert calls[3:] == [False, True]


def test_a_checkpoint_module_without_a_computation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="writes _forward"):
        older("colossal.nn.CheckpointModule")(checkpoint=False)(torch.ones(1))


# ------------------------------------------------------------------------------------------ accumulation


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_are_there_after_an_accumulated_update_and_not_added_to_the_next(clears: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    model = nn.Linear(3, 1)
    alone = nn.Linear(3, 1)
    alone.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)

    def program() -> None:
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_accumulation=2)
        for update in range(3):
            reference.zero_grad()
            for micro in range(2):
                part = x[2 * update + micro : 2 * update + micro + 1]
                if clears:
                    engine.zero_grad()
                engine.backward(engine(part).square().mean())
                engine.step()
                (alone(part).square().mean() / 2).backward()
            reference.step()
            for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad)
                torch.testing.assert_close(found, expected)

    run_threads(program, 1)


# ------------------------------------------------------------------------------------------ parameters


def test_parameters_of_sharded_layers_are_gathered() -> None:
    gather = older("colossal.checkpoint_io.utils.gather_distributed_param")
    is_sharded = older("colossal.tensor.d_tensor.is_customized_distributed_tensor")

    def program() -> Any:
        with ParallelMesh(tp=2):
            layer = Linear1D_Col(4, 6, gather_output=True)
            x = torch.ones(1, 4)
            assert is_sharded(layer.weight)
            weight, bias = gather(layer.weight), gather(layer.bias)
            assert not weight.requires_grad
            return layer(x).detach(), torch.nn.functional.linear(x, weight, bias), weight.shape

    for out, expected, shape in run_threads(program, 2):
        assert shape == (6, 4)
        torch.testing.assert_close(out, expected)


def test_tensors_of_a_spec_and_full_ones_are_gathered() -> None:
    gather = older("colossal.checkpoint_io.utils.gather_distributed_param")
    is_sharded = older("colossal.tensor.d_tensor.api.is_customized_distributed_tensor")
    full = torch.arange(8.0).view(4, 2)

    def program() -> Any:
        tensor = distribute_tensor(full, DeviceMesh(torch.arange(2), (2,)), ShardingSpec(2, {0: [0]}))
        assert not is_sharded(tensor)
        return gather(tensor)

    assert all(torch.equal(found, full) for found in run_threads(program, 2))
    parameter = nn.Parameter(full)
    assert gather(parameter, keep_vars=True) is parameter
    assert not gather(parameter).requires_grad


def test_padded_tensors_keep_their_layout_and_lose_the_zeros() -> None:
    module: Any = importlib.import_module("colossal.tensor.padded_tensor")
    get_layout = older("colossal.tensor.d_tensor.get_layout")
    full = torch.arange(8.0).view(4, 2)

    def program() -> Any:
        tensor = distribute_tensor(full, DeviceMesh(torch.arange(2), (2,)), ShardingSpec(2, {0: [0]}))
        padded = module.to_padded_tensor(tensor, 3, 0)
        assert (padded.shape, padded[2].tolist()) == ((3, 2), [0.0, 0.0])
        assert get_layout(padded) is get_layout(tensor)
        assert module.to_padded_tensor(padded, 9, 0) is padded
        for copy in (padded.clone(), padded.detach(), padded.clone().detach()):
            assert module.is_padded_tensor(copy)
            assert get_layout(copy) is get_layout(tensor)
            assert torch.equal(module.to_unpadded_tensor(copy), tensor)
        back = module.to_unpadded_tensor(padded)
        assert get_layout(back) is get_layout(tensor)
        return torch.equal(back, tensor), module.is_padded_tensor(padded), module.is_padded_tensor(back)

    assert run_threads(program, 2) == [(True, True, False)] * 2
    assert module.to_padded_tensor(full, 3, -1).shape == (4, 3)
    assert module.to_unpadded_tensor(full) is full
    with pytest.raises(ShapeError, match="Found the length 4"):
        module.to_padded_tensor(full, 3, 0)


def test_the_state_dicts_of_stages_are_put_together() -> None:
    gather = older("colossal.utils.checkpointing.gather_pipeline_parallel_state_dict")

    def program() -> Any:
        with ParallelMesh(pp=2, dp=1) as mesh:
            return gather({f"{mesh.rank('pp')}.weight": torch.full((2,), float(mesh.rank("pp")))})

    for found in run_threads(program, 2):
        assert {name: value.tolist() for name, value in found.items()} == {"0.weight": [0, 0], "1.weight": [1, 1]}


def test_an_attribute_is_set_by_its_path() -> None:
    put = older("colossal.shardformer._utils.setattr_")
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
    new = nn.ReLU()
    put(model, "layers[1]", new)
    put(model, "layers[0].out_features", 7)
    assert model.layers[1] is new
    assert model.layers[0].out_features == 7
    put(model, "layers[0].missing", 1, ignore=True)
    assert not hasattr(model.layers[0], "missing")
    with pytest.raises(AttributeError, match="missing"):
        put(model, "layers[0].missing", 1)


def test_an_attribute_is_found_by_its_path() -> None:
    find = older("colossal.shardformer._utils.getattr_")
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4))])})
    layers: Any = model["layers"]
    assert find(model, "layers[0].weight") is layers[0].weight
    assert find(model, "layers[1][0].bias") is layers[1][0].bias
    assert find(model, "layers[0].nothing.weight", ignore=True) is None
    with pytest.raises(AttributeError, match="'nothing', a part of"):
        find(model, "layers[0].nothing")


def test_a_randomizer_draws_apart_from_the_program() -> None:
    module: Any = importlib.import_module("colossal.shardformer.layer.utils")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    own = module.Randomizer(5)
    with own.fork_rng():
        first = torch.rand(2)
    assert torch.equal(torch.rand(3), expected)
    with own.fork_rng():
        second = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), torch.cat([first, second]))


def test_randomizers_differ_by_rank_and_by_number_until_the_index_is_reset() -> None:
    module: Any = importlib.import_module("colossal.shardformer.layer.utils")
    make = module.create_randomizer_with_offset

    def draw(randomizer: Any) -> list[float]:
        with randomizer.fork_rng():
            return torch.rand(2).tolist()

    module.Randomizer.reset_index()
    first, second, same = draw(make(7)), draw(make(7)), draw(make(7, offset_by_index=False))
    assert module.Randomizer.index() == 3
    assert first != second
    assert first == same
    module.Randomizer.reset_index()
    assert draw(make(7)) == first
    module.Randomizer.reset_index()
    first_of_ranks = run_threads(lambda: make(7, offset_by_index=False)._state, 2)  # the generators of torch are shared
    assert not torch.equal(first_of_ranks[0][0], first_of_ranks[1][0])


@pytest.mark.parametrize("axes", [0, 1, [0, 1]])
def test_a_sum_over_several_axes_adds_up_all_ranks(axes: int | list[int]) -> None:
    module: Any = importlib.import_module("colossal.tensor.shape_consistency")
    make_spec = older("colossal.tensor.sharding_spec.ShardingSpec")

    def program() -> tuple[float, float]:
        mesh = DeviceMesh(torch.arange(4), (2, 2), init_process_group=True)
        spec, own = make_spec(mesh, (2,), dim_partition_dict={}), torch.full((2,), float(dist.get_rank() + 1))
        patterns = module.CollectiveCommPattern
        add = module.CommSpec(patterns.ALLREDUCE_FWD_IDENTITY_BWD, spec, logical_process_axis=axes)
        keep = module.CommSpec(patterns.IDENTITY_FWD_ALLREDUCE_BWD, spec, logical_process_axis=axes)
        x = torch.ones(2, requires_grad=True)
        (keep.covert_spec_to_action(x) * own).sum().backward()
        return add.covert_spec_to_action(own)[0].item(), torch.as_tensor(x.grad)[0].item()

    expected = {0: [4, 6, 4, 6], 1: [3, 3, 7, 7]}.get(axes if isinstance(axes, int) else -1, [10] * 4)
    assert run_threads(program, 4) == [(value, value) for value in expected]


# ------------------------------------------------------------------------------------------ delayed and background work


def test_gradients_of_weights_are_computed_when_they_are_popped() -> None:
    store = older("colossal.pipeline.weight_grad_store.WeightGradStore")
    layer = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    x, grad = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    (expected,) = torch.autograd.grad(layer(x), [layer.weight], grad)
    layer.weight.grad = torch.zeros_like(layer.weight)

    def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, weight_grad: torch.Tensor) -> None:
        weight_grad += grad_output.mT @ total_input

    for chunk in (0, 1, 1):
        store.put(x, grad, layer.weight, accumulate)
        store.flush(chunk)
    assert not layer.weight.grad.any()
    store.pop(0)
    torch.testing.assert_close(layer.weight.grad, expected)
    store.clear(0, chunk=1)
    torch.testing.assert_close(layer.weight.grad, 3 * expected)
    with pytest.raises(PlanError, match="Call flush once for each pop"):
        store.pop(1)


def test_tensors_are_written_in_the_background(tmp_path: Path) -> None:
    save = older("colossal.utils.safetensors.save")
    move_and_save = older("colossal.utils.safetensors.move_and_save")
    tensors = {"w": torch.randn(3, 4, requires_grad=True), "b": torch.arange(4).bfloat16()}
    pinned = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in tensors.items()}
    one, other = str(tmp_path / "one.safetensors"), str(tmp_path / "other.safetensors")
    save(one, tensors, {"step": "3"}).synchronize()
    move_and_save(other, {**tensors, "w": tensors["w"].mT.mT}, pinned).synchronize()
    for path in (one, other):
        found = load_file(path)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(one, "pt") as file:
        assert file.metadata() == {"step": "3"}
    assert torch.equal(pinned["w"], tensors["w"])
    with pytest.raises(ShapeError, match="'w' is copied to"):
        move_and_save(other, tensors, {"w": torch.empty(2)})
    with pytest.raises(Exception, match="No such file"):
        save(str(tmp_path / "no" / "file"), tensors).synchronize()
