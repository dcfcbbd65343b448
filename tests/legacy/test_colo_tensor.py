"""Distributed tensors of the older API: their groups, specs, conversions, and operations with gradients."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch.nn import functional

from colossal.errors import MeshError, PlanError, UnsupportedError
from colossal.legacy.tensor import (
    ColoInitContext,
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from colossal.tensor import full_tensor_of, placement_of
from colossal.testing import WorldError, fake_world, run_threads

make_parameter: Any = ColoParameter  # whose class is taken for that of nn.Parameter


def draw(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------ groups and specs


def test_group_puts_tensor_parallel_ranks_next_to_each_other() -> None:
    with fake_world(8, rank=5):
        group = ProcessGroup(tp_degree=4, dp_degree=2)
        assert group.tp_rank_list() == [4, 5, 6, 7]
        assert group.dp_rank_list() == [1, 5]
        assert (group.rank(), group.tp_local_rank(), group.dp_local_rank()) == (5, 1, 1)
        assert (group.world_size(), group.tp_world_size(), group.dp_world_size()) == (8, 4, 2)
        assert ProcessGroup(dp_degree=4).tp_world_size() == 2
        assert ProcessGroup().dp_world_size() == 8
        assert ProcessGroup(tp_degree=4) == group
        assert ProcessGroup(tp_degree=2) != group
        assert group.mesh.shape == {"pp": 1, "dp": 2, "sp": 1, "tp": 4}
        assert group.get_ranks_in_tp() == group.tp_rank_list()


def test_group_of_some_ranks() -> None:
    def program() -> Any:
        from torch import distributed as dist

        if dist.get_rank() == 1:
            return None
        group = ProcessGroup(ranks=[0, 2, 3], tp_degree=3)
        tensor = ColoTensor(torch.full((1,), float(group.rank())), ColoTensorSpec(group, ShardSpec([0], [3])))
        return group.tp_rank_list(), tensor.to_replicate().tolist()

    assert run_threads(program, 4) == [([0, 2, 3], [0.0, 2.0, 3.0])] * 1 + [None] + [([0, 2, 3], [0.0, 2.0, 3.0])] * 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ProcessGroup(tp_degree=3), MeshError, "tp_degree=3"),
        (lambda: ProcessGroup(tp_degree=2, dp_degree=4), MeshError, "dp_degree=4 for 4 ranks"),
        (lambda: ProcessGroup(rank=2), MeshError, "rank=2"),
        (lambda: ProcessGroup(ranks=[1, 2]), MeshError, r"ranks=\[1, 2\] on rank 0"),
        (lambda: ShardSpec([0, 1], [2, 2]), UnsupportedError, r"dims=\[0, 1\]"),
        (lambda: ShardSpec([0], [2, 2]), PlanError, r"num_partitions=\[2, 2\]"),
        (lambda: ComputeSpec(ComputePattern.TP2D), UnsupportedError, "TP2D"),
        (
            lambda: ColoTensor(torch.ones(2), ColoTensorSpec(ProcessGroup(tp_degree=2), ShardSpec([0], [4]))),
            PlanError,
            r"num_partitions=\[4\]",
        ),
        (
            lambda: ColoTensor(torch.ones(2), ColoTensorSpec(ProcessGroup(tp_degree=2), ShardSpec([1], [2]))),
            PlanError,
            r"dims=\[1\] for the shape \(2,\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with fake_world(4), pytest.raises(error, match=message):
        make()


def test_group_needs_processes() -> None:
    with pytest.raises(MeshError, match="launch_from_torch"):
        ProcessGroup()


# ------------------------------------------------------------------------------------------ conversions


def test_program_of_the_concept_page() -> None:
    def program() -> Any:
        group = ProcessGroup(tp_degree=2, dp_degree=2)
        local = draw(2, 3, 1)
        compute = ComputeSpec(ComputePattern.TP1D)
        spec = ColoTensorSpec(group, ShardSpec(dims=[-1], num_partitions=[group.tp_world_size()]), compute)
        tensor = ColoTensor.from_torch_tensor(local, spec)
        tensor = tensor.to_replicate()
        gathered = tensor.data
        tensor.set_dist_spec(ShardSpec([0], [group.tp_world_size()]))
        return type(gathered), gathered, tensor.shape, tensor.data, tensor.size_global(), tensor.size()

    local = draw(2, 3, 1)
    full = torch.cat([local, local], -1)
    for rank, (kind, gathered, shape, values, size_global, size) in enumerate(run_threads(program, 4)):
        assert kind is torch.Tensor
        assert torch.equal(gathered, full)
        assert shape == (1, 3, 2)
        assert torch.equal(values, full[rank % 2][None])
        assert size_global == size == (2, 3, 2)


def test_conversions_bring_gradients_back() -> None:
    def program() -> Any:
        group = ProcessGroup(tp_degree=2)
        leaf = draw(4, 2, seed=group.tp_local_rank()).requires_grad_()
        tensor = ColoTensor(leaf * 2, ColoTensorSpec(group, ShardSpec([1], [2])))
        tensor.set_dist_spec(ShardSpec([0], [2]))  # in place, and followed by autograd
        moved = tensor.redistribute(ReplicaSpec())
        (moved * draw(4, 4, seed=9)).sum().backward()
        return moved.data, leaf.grad

    full = torch.cat([2 * draw(4, 2, seed=0), 2 * draw(4, 2, seed=1)], 1)
    for rank, (values, grad) in enumerate(run_threads(program, 2)):
        assert_equal(values, full, "values")
        assert_equal(grad, 2 * draw(4, 4, seed=9).chunk(2, 1)[rank], "gradient")


def test_parameter_knows_its_placement_and_moves_to_another_group() -> None:
    def program() -> Any:
        parameter: Any = make_parameter.from_torch_tensor(draw(4, 3))
        parameter.grad = draw(4, 3, seed=1)
        group = ProcessGroup(tp_degree=2)
        parameter.set_process_group(group)
        parameter.set_tensor_spec(ShardSpec([-1], [2]), ComputeSpec(ComputePattern.TP1D))
        found = tuple(parameter.shape), parameter.is_shard_1dcol(), parameter.has_compute_spec()
        placement = placement_of(parameter)
        with pytest.raises(MeshError, match="to_replicate_"):
            parameter.set_process_group(ProcessGroup(tp_degree=4))
        twin = copy.deepcopy(parameter)
        assert twin.dist_spec == parameter.dist_spec
        assert isinstance(twin, torch.nn.Parameter)
        with pytest.raises(UnsupportedError, match="A file holds full tensors"):
            pickle.dumps(parameter)
        norm = parameter.grad.norm().item()
        grad = full_tensor_of(parameter.grad).clone()
        values = parameter.to_replicate_().data
        return found, placement.shape, placement.is_sharded, norm, grad, values, parameter.is_replicate()

    for found, shape, is_sharded, norm, grad, values, is_replicate in run_threads(program, 4):
        assert found[0] in ((4, 2), (4, 1))  # an uneven dimension is split as torch.chunk does
        assert found[1:] == (True, True)
        assert (shape, is_sharded, is_replicate) == ((4, 3), True, True)
        assert norm == pytest.approx(draw(4, 3, seed=1).norm().item())
        assert_equal(grad, draw(4, 3, seed=1), "gradient")
        assert_equal(values, draw(4, 3), "values")


# ------------------------------------------------------------------------------------------ operations

OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear": functional.linear,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()) if not isinstance(w, ColoTensor) else torch.addmm(b, x, w),
    "matmul": lambda x, w, b: x @ w.t() + b if not isinstance(w, ColoTensor) else x @ w + b,
    "mm": lambda x, w, b: torch.mm(x, w.t()) * b if not isinstance(w, ColoTensor) else torch.mm(x, w) * b,
}


def use_weight(operation: str, dim: int | None, bias_is_sharded: bool, keeps: bool) -> Any:
    group = ProcessGroup(tp_degree=2)
    x = draw(3, 6, seed=3).requires_grad_()
    weight, bias = draw(5, 6, seed=1), draw(5, seed=2)
    parameter: Any = make_parameter(weight if operation == "linear" else weight.t().contiguous())
    shift: Any = make_parameter(bias)
    for each in (parameter, shift):
        each.set_process_group(group)
    if dim is not None:
        parameter.set_tensor_spec(ShardSpec([dim], [2]), ComputeSpec(ComputePattern.TP1D))
        parameter.compute_spec.set_output_replicate(not keeps)
    if bias_is_sharded:
        shift.set_dist_spec(ShardSpec([0], [2]))
    out = OPERATIONS[operation](x, parameter, shift)
    is_sharded = out.is_sharded()
    loss = (functional.gelu(out) * draw(3, 5, seed=4)).sum()
    loss.backward()
    grads = [full_tensor_of(each.grad).clone() for each in (parameter, shift)]
    return is_sharded, loss.item(), x.grad, grads[0] if operation == "linear" else grads[0].t(), grads[1]


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize(
    ("dim", "bias_is_sharded", "keeps"),
    [(0, True, True), (0, False, False), (1, False, True), (1, True, False), (None, True, False)],
)
def test_products_equal_one_process(operation: str, dim: int | None, bias_is_sharded: bool, keeps: bool) -> None:
    x, weight, bias = (
        draw(*shape, seed=seed).requires_grad_() for shape, seed in (((3, 6), 3), ((5, 6), 1), ((5,), 2))
    )
    loss = (functional.gelu(OPERATIONS[operation](x, weight, bias)) * draw(3, 5, seed=4)).sum()
    loss.backward()
    is_column = dim == (0 if operation == "linear" else 1)
    for is_sharded, value, *grads in run_threads(use_weight, 2, operation, dim, bias_is_sharded, keeps):
        if operation in ("linear", "addmm"):
            assert is_sharded == (is_column and keeps)
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for name, grad, leaf in zip("xwb", grads, (x, weight, bias), strict=True):
            assert_equal(grad, leaf.grad, f"gradient of {name}")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("keeps", [True, False])
def test_lookups_equal_one_process(dim: int, keeps: bool) -> None:
    tokens = torch.tensor([[0, 4, 2], [6, 3, 1]])

    def program() -> Any:
        group = ProcessGroup(tp_degree=2)
        table: Any = make_parameter(draw(7, 4), spec=ColoTensorSpec(group))
        table.set_tensor_spec(ShardSpec([dim], [2]), ComputeSpec(ComputePattern.TP1D))
        table.compute_spec.set_output_replicate(not keeps)
        out: Any = functional.embedding(tokens, table, padding_idx=4)
        (out * draw(2, 3, 4, seed=5)).sum().backward()
        found = out.is_sharded(), out.to_replicate().data, full_tensor_of(table.grad).clone()
        with pytest.raises(IndexError):
            functional.embedding(torch.tensor([7]), table)
        return found

    table = draw(7, 4).requires_grad_()
    expected = functional.embedding(tokens, table, padding_idx=4)
    (expected * draw(2, 3, 4, seed=5)).sum().backward()
    for is_sharded, values, grad in run_threads(program, 2):
        assert is_sharded == (dim == 1 and keeps)
        assert_equal(values, expected.detach(), "output")
        assert_equal(grad, table.grad, "gradient")


@pytest.mark.parametrize("dim", [0, 1])
def test_losses_equal_one_process(dim: int) -> None:
    targets = torch.tensor([0, 5, -100, 2])

    def program() -> Any:
        group = ProcessGroup(tp_degree=2)
        logits = draw(4, 6).requires_grad_()
        sharded = ColoTensor(logits * 1, ColoTensorSpec(group)).redistribute(ShardSpec([dim], [2]))
        loss = functional.cross_entropy(sharded, targets, label_smoothing=0.1)
        loss.backward()
        return loss.data, logits.grad

    logits = draw(4, 6).requires_grad_()
    expected = functional.cross_entropy(logits, targets, label_smoothing=0.1)
    expected.backward()
    for loss, grad in run_threads(program, 2):
        assert_equal(loss, expected.detach(), "loss")
        assert_equal(grad, logits.grad, "gradient")


ELEMENTWISE: dict[str, tuple[Callable[..., Any], tuple[int, ...], bool]] = {
    "add": (lambda a, b: a + b, (4, 6), True),
    "broadcast": (lambda a, b: torch.relu(a) * b, (6,), True),
    "rows": (lambda a, b: a / (b * b + 1), (4, 1), True),
    "scalar": (lambda a, b: 2 * a - b, (), True),
    "left": (lambda a, b: b - a, (2, 4, 6), True),
    "view": (lambda a, b: a.view(2, 2, 6) + b, (6,), True),
    "softmax": (lambda a, b: torch.softmax(a, -1) * b, (4, 6), False),
    "cat": (lambda a, b: torch.cat([a, b], 0), (4, 6), False),
    "transpose": (lambda a, b: a.t() @ b, (4, 6), False),
}


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_other_operations_equal_one_process(name: str) -> None:
    function, shape, stays = ELEMENTWISE[name]

    def program() -> Any:
        group = ProcessGroup(tp_degree=2)
        left, right = draw(4, 6).requires_grad_(), draw(*shape, seed=1).requires_grad_()
        sharded = ColoTensor(left * 1, ColoTensorSpec(group)).redistribute(ShardSpec([1], [2]))
        out = function(sharded, right)
        is_sharded = out.is_sharded()
        (out * out).sum().backward()
        return is_sharded, out.to_replicate().data, left.grad, right.grad

    left, right = draw(4, 6).requires_grad_(), draw(*shape, seed=1).requires_grad_()
    expected = function(left, right)
    (expected * expected).sum().backward()
    for is_sharded, values, *grads in run_threads(program, 2):
        assert is_sharded == stays
        assert_equal(values, expected.detach(), "output")
        for grad, leaf in zip(grads, (left, right), strict=True):
            assert_equal(grad, leaf.grad, "gradient")


def test_writing_in_place() -> None:
    def program() -> Any:
        group = ProcessGroup(tp_degree=2)
        parameter: Any = make_parameter(draw(4, 2), spec=ColoTensorSpec(group))
        parameter.set_dist_spec(ShardSpec([0], [2]))
        states = torch.zeros_like(parameter)
        with torch.no_grad():
            parameter.add_(draw(4, 2, seed=1))  # the full tensor
            parameter.add_(states + 1)  # what this rank has
            parameter[1] = 5.0  # not elementwise
            parameter.index_fill_(0, torch.tensor([3]), 7.0)
        with pytest.raises(UnsupportedError, match="to_replicate"):
            (ColoTensor.from_torch_tensor(parameter.data, parameter.tensor_spec).requires_grad_()).index_fill_(
                0, torch.tensor([0]), 1.0
            )
        return type(states), parameter.to_replicate().data

    expected = draw(4, 2) + draw(4, 2, seed=1) + 1
    expected[1], expected[3] = 5.0, 7.0
    for kind, values in run_threads(program, 2):
        assert kind is torch.Tensor
        assert_equal(values, expected, "values")


def test_gradients_by_autograd_grad() -> None:
    def program() -> Any:
        group = ProcessGroup(tp_degree=2)
        parameter: Any = make_parameter(draw(4, 2), spec=ColoTensorSpec(group))
        parameter.set_dist_spec(ShardSpec([0], [2]))
        out = functional.linear(draw(3, 2, seed=1), parameter)
        (grad,) = torch.autograd.grad((out * out).sum(), [parameter])
        return grad

    weight = draw(4, 2).requires_grad_()
    out = functional.linear(draw(3, 2, seed=1), weight)
    (expected,) = torch.autograd.grad((out * out).sum(), [weight])
    for rank, grad in enumerate(run_threads(program, 2)):
        assert_equal(grad, expected.chunk(2)[rank], "gradient")


# ------------------------------------------------------------------------------------------ the context


def test_context_converts_what_is_built_inside() -> None:
    with fake_world(2):
        group = ProcessGroup(tp_degree=2)
        before = torch.nn.Linear(2, 2)
        with ColoInitContext(dtype=torch.float64, default_pg=group, default_dist_spec=ShardSpec([-1], [2])):
            inside: Any = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
            inside[0].register_parameter("tied", inside[0].weight)
        after = torch.nn.Linear(2, 2)
    assert type(before.weight) is type(after.weight) is torch.nn.Parameter
    assert isinstance(inside[0].weight, ColoParameter)
    assert inside[0].tied is inside[0].weight
    assert (inside[0].weight.shape, inside[0].weight.dtype) == ((2, 2), torch.float64)
    assert inside[1].running_mean.dtype == torch.float32


def test_context_ends_after_an_error() -> None:
    with fake_world(2), pytest.raises(RuntimeError), ColoInitContext():
        torch.nn.Linear(-2, 2)
    assert type(torch.nn.Linear(2, 2).weight) is torch.nn.Parameter


def test_ranks_fail_with_their_message() -> None:
    def program() -> None:
        ColoTensor(torch.ones(2), ColoTensorSpec(ProcessGroup(tp_degree=2), ShardSpec([0], [3])))

    with pytest.raises(WorldError, match="num_partitions"):
        run_threads(program, 2)


def test_a_spec_over_one_rank_is_kept() -> None:
    def program() -> Any:
        tensor: Any = ColoTensor.from_torch_tensor(torch.ones(4, 2), ColoTensorSpec(ProcessGroup()))
        tensor.set_tensor_spec(ShardSpec([0], [1]), None)
        assert tensor.is_sharded()
        zeros: Any = torch.zeros_like(tensor)
        assert zeros.is_sharded()
        tensor.set_tensor_spec(None, ComputeSpec(ComputePattern.TP1D))
        return tensor.is_sharded(), tensor.compute_spec is not None

    assert run_threads(program, 1) == [(True, True)]


def test_a_plain_tensor_of_the_shape_of_the_shard_meets_the_shard() -> None:
    full = torch.arange(8.0).view(4, 2)

    def program() -> Any:
        group = ProcessGroup(tp_degree=2)
        tensor: Any = ColoTensor.from_torch_tensor(full.clone(), ColoTensorSpec(group))
        tensor.set_dist_spec(ShardSpec([0], [2]))
        own = full.chunk(2)[group.tp_local_rank()]
        assert bool(torch.all(own == tensor))
        total: Any = tensor + own
        assert total.is_sharded()
        assert total.size_global() == (4, 2)
        whole: Any = tensor + full
        assert tensor.view(4, 1, 2).dist_spec == tensor.dist_spec
        tensor.set_dist_spec(ShardSpec([-1], [2]))
        assert tensor.view(2, 2, 2).dist_spec == tensor.dist_spec
        return total.to_replicate(), whole.to_replicate()

    for local, whole in run_threads(program, 2):
        assert torch.equal(local, 2 * full)
        assert torch.equal(whole, 2 * full)


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), 0), ((4, 2), -1)])
def test_a_plain_parameter_that_shards_of_one_row_share_gets_the_gradients_of_all_ranks(
    shape: tuple[int, int], dim: int
) -> None:
    def bias_of() -> torch.Tensor:
        return torch.ones([1 if at == dim % 2 else length for at, length in enumerate(shape)], requires_grad=True)

    def program() -> torch.Tensor:
        tensor: Any = ColoTensor.from_torch_tensor(draw(*shape).float(), ColoTensorSpec(ProcessGroup(tp_degree=2)))
        tensor.set_dist_spec(ShardSpec([dim], [2]))
        bias = bias_of()
        (tensor * bias).to_replicate().square().sum().backward()
        assert bias.grad is not None
        return bias.grad

    expected = bias_of()
    (draw(*shape).float() * expected).square().sum().backward()
    assert expected.grad is not None
    for grad in run_threads(program, 2):
        torch.testing.assert_close(grad, expected.grad)


def test_a_shard_is_compared_with_a_plain_tensor_of_its_shape() -> None:
    def program() -> None:
        group = ProcessGroup(tp_degree=2)
        local = draw(2, 2)
        sharded = ColoTensor(local.clone(), ColoTensorSpec(group, ShardSpec([0], [2])))
        full = torch.cat([local, local])
        assert torch.equal(sharded, local)
        assert torch.allclose(torch.abs(sharded), local.abs())
        assert torch.equal(sharded, full)
        assert not torch.equal(sharded, local + 1)
        assert not torch.equal(sharded, full + 1)

    run_threads(program, 2)
