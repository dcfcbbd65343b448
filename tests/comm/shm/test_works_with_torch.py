"""What torch builds on process groups works on shared memory, and does what it does in one process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from colossal.testing import run_processes

STEPS = 3
SINGLE = {"rtol": 1e-5, "atol": 1e-6}
"""Gradients of halves of a batch are added in another order than those of the whole."""
HALF = {"rtol": 1e-2, "atol": 1e-3}
"""The hook sends gradients in half precision."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 20, generator=generator).chunk(parts)[part].split([16, 4], 1)
    return x, y


def train(net: nn.Module, part: int = 0, parts: int = 1) -> list[torch.Tensor]:
    """Return the loss of each step, the last gradients and the parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, part, parts)
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    parameters = list(net.parameters())
    return [*losses, *(whole(p.grad) for p in parameters), *(whole(p.detach()) for p in parameters)]


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def mean_loss(found: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Make one account of those of all ranks: their losses are of parts of a batch, all else must be the same bits."""
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0][STEPS:], other[STEPS:], strict=True))
    losses = [torch.stack(each).mean() for each in zip(*(one[:STEPS] for one in found), strict=True)]
    return [*losses, *found[0][STEPS:]]


def train_in_parallel(kind: str) -> list[torch.Tensor]:
    net, rank, size = model(), dist.get_rank(), dist.get_world_size()
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (size,))
        for layer in net.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return train(net, rank, size)
    bucket_mb = 25 if kind == "low rank" else 1e-3  # its callbacks would meet the next bucket in any order
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=kind == "views")
    if kind == "half":
        ddp.register_comm_hook(None, fp16_compress_hook)
    if kind == "low rank":
        state = PowerSGDState(None, 24, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook)
    return train(ddp, rank, size)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("plain", SINGLE), ("views", SINGLE), ("half", HALF), ("low rank", None), ("sharded", SINGLE)],
)
def test_training_in_parallel_equals_training_alone(kind, tolerance) -> None:
    found = mean_loss(run_processes(train_in_parallel, 2, kind))
    if tolerance is None:  # an approximation; that it comes to an end is what is tested
        return
    for one, other in zip(found, train(model()), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# --------------------------------------------------------------------------------------------------- tensors


def redistribute() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(60.0).view(10, 6)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), full)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), full.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    partial = DTensor.from_local(full * (mesh.get_local_rank() + 1), mesh, [Partial()])
    times = sum(range(mesh.size() + 1))
    assert torch.equal(partial.redistribute(mesh, [Shard(0)]).full_tensor(), full * times)
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), full * times)
    product: Any = distribute_tensor(full.t().contiguous(), mesh, [Shard(1)]) @ rows
    torch.testing.assert_close(product.full_tensor(), full.t() @ full)


def use_functional_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    own = torch.arange(6.0).view(3, 2) + rank
    everybody = [torch.arange(6.0).view(3, 2) + each for each in range(size)]
    assert torch.equal(functional.all_reduce(own, "sum", group), torch.stack(everybody).sum(0))
    assert torch.equal(functional.all_gather_tensor(own, 0, group), torch.cat(everybody))
    scattered = functional.reduce_scatter_tensor(torch.cat([own] * size), "sum", 0, group)
    assert torch.equal(scattered, torch.stack(everybody).sum(0))
    assert torch.equal(functional.broadcast(own, 1, group), everybody[1])
    exchanged = functional.all_to_all_single(own[:size], [1] * size, [1] * size, group)
    assert torch.equal(exchanged, torch.stack([each[rank] for each in everybody]))
    several = functional.all_reduce_coalesced([own, own * 2], "sum", group)
    assert torch.equal(several[1], 2 * torch.stack(everybody).sum(0))
    value = torch.ones(3, requires_grad=True)
    (differentiable_all_reduce(value * (rank + 1)) * (rank + 1)).sum().backward()
    assert torch.equal(whole(value.grad), torch.full((3,), float(sum(range(size + 1)) * (rank + 1))))


def save_and_load(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = {"weight": distribute_tensor(torch.arange(40.0).view(10, 4), mesh, [Shard(0)]), "step": 3}
    dcp.save(saved, checkpoint_id=f"{folder}/at once")
    group: Any = dist.new_group()
    future: Any = dcp.async_save(saved, checkpoint_id=f"{folder}/later", process_group=group)
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    future.result()
    for name in ("at once", "later"):
        loaded = {"weight": distribute_tensor(torch.zeros(10, 4), mesh, [Shard(1)]), "step": 0}
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        assert torch.equal(loaded["weight"].full_tensor(), torch.arange(40.0).view(10, 4))
        assert loaded["step"] == 3


def use_tensors_of_torch(folder: str) -> None:
    redistribute()
    use_functional_collectives()
    save_and_load(folder)


def test_distributed_tensors_functional_collectives_and_checkpoints(tmp_path) -> None:
    run_processes(use_tensors_of_torch, 3, str(tmp_path))


# --------------------------------------------------------------------------------------------------- groups


def use_meshes() -> None:
    rank = dist.get_rank()
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    expected = {"dp": [rank % 2, rank % 2 + 2], "tp": [rank // 2 * 2, rank // 2 * 2 + 1], "all": [0, 1, 2, 3]}
    for name, part in (("dp", mesh["dp"]), ("tp", mesh["tp"]), ("all", flat)):
        group = part.get_group()
        assert dist.get_backend(group) == "shm"
        assert dist.get_process_group_ranks(group) == expected[name]
        value = torch.tensor(10.0**rank)
        dist.all_reduce(value, group=group)
        assert value == sum(10.0**each for each in expected[name])
    pass_on(mesh["tp"].get_group())
    pass_on(None)


def pass_on(group: Any) -> None:
    """Send activations forward and gradients backward at the same time, as the stages of a pipeline do."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    rank, size = dist.get_rank(group), len(ranks)
    after, before = ranks[(rank + 1) % size], ranks[rank - 1]
    for number in range(4):
        activation, gradient = torch.full((7, 300), float(rank)), torch.full((number * 40_000,), float(-rank))
        received = [torch.empty_like(activation), torch.empty_like(gradient)]
        operations = [
            dist.P2POp(dist.irecv, received[0], before, group),
            dist.P2POp(dist.isend, activation, after, group),
            dist.P2POp(dist.irecv, received[1], after, group, tag=1),
            dist.P2POp(dist.isend, gradient, before, group, tag=1),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (received[0] == (rank - 1) % size).all()
        assert (received[1] == -((rank + 1) % size)).all()


def test_meshes_and_pipelines() -> None:
    run_processes(use_meshes, 4)


def use_two_groups_at_once() -> None:
    groups: list[Any] = [dist.new_group() for _ in range(3)]
    rank, size, failures = dist.get_rank(), dist.get_world_size(), []

    def reduce(group: Any, length: int) -> None:
        for number in range(100):
            value = torch.full((length,), float(number))
            dist.all_reduce(value, group=group)
            assert (value == number * size).all()

    def send(group: Any) -> None:
        for number in range(100):
            value, room = torch.full((number * 50,), float(number)), torch.empty(number * 50)
            work: Any = dist.isend(value, 1 - rank, group=group)
            dist.recv(room, 1 - rank, group=group)
            work.wait()
            assert torch.equal(room, value)

    def guarded(function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 (told below)
            failures.append(error)

    calls = [(reduce, groups[0], 10), (reduce, groups[1], 20_000), (send, groups[2]), (send, groups[0])]
    threads = [threading.Thread(target=guarded, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_threads_of_one_process_use_several_groups_at_once() -> None:
    run_processes(use_two_groups_at_once, 2, fresh=True)


# --------------------------------------------------------------------------------------------------- works


def watch_works() -> None:
    """Look at a collective and a message while the other rank is held up, and after."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    value, room = torch.ones(3), torch.zeros(3)
    if rank == 1:
        store.wait(["seen"])
    collective: Any = dist.all_reduce(value, async_op=True)
    message: Any = dist.irecv(room, 1 - rank)
    called: list[Any] = []
    future = collective.get_future().then(lambda done: called.append(done.value()) or "done")
    if rank == 0:
        assert not collective.is_completed()
        assert not collective.is_success()
        assert not message.is_completed()
        assert not called
        with pytest.raises(RuntimeError, match=r"within 0.01 s. Found that it is not. Wait longer."):
            collective.wait(timedelta(seconds=0.01))
        store.set("seen", "yes")
    reply: Any = dist.isend(torch.full((3,), 1.0 + rank), 1 - rank)
    assert future.wait() == "done"
    assert collective.wait()
    assert collective.wait(timedelta(seconds=20))
    assert message.wait(timedelta(seconds=20))
    assert torch.equal(called[0][0], value)
    assert value.tolist() == [2.0] * 3
    assert room.tolist() == [2.0 - rank] * 3
    assert message.source_rank() == message._source_rank() == 1 - rank
    barrier: Any = dist.barrier(async_op=True)
    for work in (collective, message, reply, barrier):
        work.synchronize()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    assert torch.equal(collective.result()[0], value)
    assert torch.equal(message.get_future().wait()[0], room)


def communicate_in_callbacks() -> None:
    """Reduce again when a reduction is over, waiting or not, as hooks of torch do."""

    def again(done: Any) -> torch.Tensor:
        (value,) = done.value()
        dist.all_reduce(value)
        work: Any = dist.all_reduce(value, async_op=True)
        return work.get_future().wait()[0]

    futures = []
    for _ in range(5):
        work: Any = dist.all_reduce(torch.ones(3), async_op=True)
        futures.append(work.get_future().then(again))
        assert futures[-1].wait().tolist() == [8.0] * 3
    room, peer = torch.zeros(3), 1 - dist.get_rank()
    messages: list[Any] = [dist.isend(torch.ones(3), peer), dist.irecv(room, peer)]
    assert messages[1].get_future().then(lambda _: dist.all_reduce(room) or room).wait().tolist() == [2.0] * 3
    messages[0].wait()


def forget_works() -> None:
    """Nobody keeps the works or the tensors: what was begun is done all the same."""
    peer = 1 - dist.get_rank()
    for number in range(20):
        dist.isend(torch.full((50_000,), float(number)), peer)
        dist.all_reduce(torch.full((50_000,), float(number)), async_op=True)
        dist.irecv(torch.empty(7), peer, tag=1)
    for number in range(20):
        room = torch.empty(50_000)
        dist.recv(room, peer)
        assert (room == number).all()
    for _ in range(20):
        dist.send(torch.empty(7), peer, tag=1)
    dist.barrier()


def hold_a_message_back() -> None:
    """What nobody has asked for fills the ring; what was asked for comes all the same, though nobody waits for it."""
    size = 300 << 10
    if dist.get_rank() == 0:
        dist.barrier()
        first: Any = dist.isend(torch.ones(size, dtype=torch.uint8), 1, tag=5)
        dist.send(torch.full((size,), 2, dtype=torch.uint8), 1, tag=6)
        dist.all_reduce(torch.zeros(1))
        first.wait()
    else:
        rooms = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        second: Any = dist.irecv(rooms[1], 0, tag=6)
        dist.barrier()
        dist.all_reduce(torch.zeros(1))
        dist.recv(rooms[0], 0, tag=5)
        second.wait()
        assert (rooms[0] == 1).all()
        assert (rooms[1] == 2).all()


def use_works() -> None:
    watch_works()
    communicate_in_callbacks()
    forget_works()
    hold_a_message_back()
    dist.barrier()


def test_works_and_futures() -> None:
    run_processes(use_works, 2)


# --------------------------------------------------------------------------------------------------- lifetime


def join_again_and_again() -> list[str]:
    """Leave the world and form it again, at the same store, too; a message of before is not there any more."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    threads: list[str] = []
    for _ in range(3):
        for prefix in ("again", "and again"):
            dist.isend(torch.ones(3), 1 - rank)
            work: Any = dist.all_reduce(torch.ones(3), async_op=True)
            work.wait()
            dist.barrier()
            dist.destroy_process_group()
            threads += [thread.name for thread in threading.enumerate() if thread.name.startswith("shm")]
            dist.init_process_group("shm", store=dist.PrefixStore(prefix, store), rank=rank, world_size=size)
            room = torch.zeros(3)
            message: Any = dist.irecv(room, 1 - rank)
            dist.send(torch.full((3,), 7.0), 1 - rank)
            message.wait()
            assert (room == 7.0).all()
    return threads


def test_a_process_leaves_and_joins_again() -> None:
    assert run_processes(join_again_and_again, 2, fresh=True) == [[], []]


@contextmanager
def world_of_one() -> Iterator[None]:
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_world_of_one(dtype) -> None:
    value = torch.arange(300_000).remainder(100).to(dtype)
    with world_of_one():
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            found, parts = value.clone(), [torch.empty_like(value)]
            dist.all_reduce(found, op)
            work: Any = dist.all_gather(parts, found, async_op=True)
            work.wait()
            dist.reduce_scatter(found, parts, op)
            dist.all_to_all_single(parts[0], found)
            dist.broadcast(parts[0], 0)
            dist.barrier()
            assert torch.equal(parts[0], value)
