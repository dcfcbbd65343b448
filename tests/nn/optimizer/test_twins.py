# pyright: reportAttributeAccessIssue=false
"""The distributed twins: told how parameters are cut, they move them as the whole, and say as much as they must."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from optimizers import CASES, STEPS, TWINS, Case, draw, grads_at, start
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from colossal._src.nn.optimizer.galore import Projection
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import ConfigError, ShapeError, UnsupportedError
from colossal.nn.optimizer import (
    CPUAdam,
    DistGaloreAdamW,
    DistGaloreAwamW,
    DistributedLamb,
    Lamb,
    cast_to_distributed,
)
from colossal.testing import fake_world, run_threads

ALL = range(1, STEPS + 1)
ONE_OF_EACH = [*TWINS, "CPUAdam", "FusedSGD, momentum", "FusedLAMB", "Lars"]


def twin_of(name: str, params: list[nn.Parameter]) -> Any:
    return Case(TWINS[name], CASES[name].reference, CASES[name].options, CASES[name].group).build(params)


def chunk_of(whole: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """This rank's chunk of a flattened and padded tensor; what pads it is no number, to be seen if it is used."""
    size = mesh.size("dp")
    flat = torch.full((-(-whole.numel() // size) * size,), torch.nan, dtype=whole.dtype)
    flat[: whole.numel()] = whole.flatten()
    return flat.chunk(size)[mesh.rank("dp")].clone()


def on_chunks(name: str, by_id: bool, with_padding: bool) -> list[torch.Tensor]:
    mesh = ParallelMesh()
    works = [nn.Parameter(whole) for whole in start()]
    shards = [nn.Parameter(chunk_of(work.detach(), mesh)) for work in works]
    optimizer = twin_of(name, shards)
    table: Mapping[Any, torch.Tensor] = {id(a) if by_id else a: b for a, b in zip(shards, works, strict=True)}
    paddings = {(id(work) if by_id else work): -work.numel() % mesh.size("dp") for work in works}
    optimizer.setup_distributed(None, mesh.group("dp"), table, paddings if with_padding else None, is_zero=True)
    for step in ALL:
        for shard, grad in zip(shards, grads_at(step), strict=True):
            shard.grad = chunk_of(grad, mesh)
        optimizer.step()
    return [shard.detach() for shard in shards]


@pytest.mark.parametrize(("size", "by_id", "with_padding"), [(2, False, True), (3, True, False), (4, True, True)])
@pytest.mark.parametrize("name", TWINS)
def test_chunks_of_zero_move_as_the_whole(name, size, by_id, with_padding) -> None:
    found = run_threads(on_chunks, size, name, by_id, with_padding)
    for parts, wanted in zip(zip(*found, strict=True), CASES[name].expected(), strict=True):
        together = torch.cat(parts)
        torch.testing.assert_close(together[: wanted.numel()].view(wanted.shape), wanted, rtol=1e-10, atol=1e-12)
        assert together[wanted.numel() :].isnan().all()


def on_tensor_parallel_ranks(name: str, dp: int) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = ParallelMesh(dp=dp, tp=2)

    def cut(whole: torch.Tensor) -> DTensor:
        dim = next((dim for dim, length in enumerate(whole.shape) if length > 3), None)
        local = whole if dim is None else whole.chunk(2, dim)[mesh.rank("tp")].contiguous()
        placement = Replicate() if dim is None else Shard(dim)
        return DTensor.from_local(
            local, mesh.device_mesh["tp"], [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    works = [nn.Parameter(cut(whole)) for whole in start()]
    params = works if dp == 1 else [nn.Parameter(chunk_of(work.detach().to_local(), mesh)) for work in works]
    optimizer: Any = (twin_of if name in TWINS else lambda name, params: CASES[name].build(params))(name, params)
    if name in TWINS:
        table = dict(zip(params, works, strict=True)) if dp > 1 else {}
        optimizer.setup_distributed(mesh.group("tp"), mesh.group("dp"), table, is_zero=dp > 1)
    for step in ALL:
        for param, grad in zip(params, grads_at(step), strict=True):
            param.grad = cut(grad) if dp == 1 else chunk_of(cut(grad).to_local(), mesh)
        optimizer.step()
    wanted = [cut(whole).to_local() for whole in CASES[name].expected()]
    for param, local in zip(params, wanted, strict=True):
        mine = param.detach().to_local() if dp == 1 else param.detach()
        expected = local if dp == 1 else chunk_of(local, mesh)
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
    return [param.detach() for param in params]


@pytest.mark.parametrize(("name", "dp"), [*((name, 1) for name in ONE_OF_EACH), *((name, 2) for name in TWINS)])
def test_tensor_parallel_parameters_move_as_the_whole(name, dp) -> None:
    run_threads(on_tensor_parallel_ranks, 2 * dp, name, dp)


# ------------------------------------------------------------------------------------------ traffic

SIZE, ROWS, COLUMNS = 2, 6, 8
MATRICES = 3


def traffic(name: str, steps: int) -> list[tuple[int, int]]:
    """How many calls each step makes, and the bytes that are summed."""
    with ParallelMesh() as mesh:
        works = [nn.Parameter(draw((ROWS, COLUMNS), i).float()) for i in range(MATRICES)]
        shards = [nn.Parameter(chunk_of(work.detach(), mesh)) for work in works]
        optimizer = twin_of(name, shards)
        optimizer.setup_distributed(None, mesh.group("dp"), dict(zip(shards, works, strict=True)), is_zero=True)
        found = []
        for step in range(steps):
            for i, shard in enumerate(shards):
                shard.grad = chunk_of(draw((ROWS, COLUMNS), 10 * step + i).float(), mesh)
            with CommCounter() as counter:
                optimizer.step()
            assert {key[0] for key in counter.calls} == {"all_reduce"}
            sent = sum(counter.bytes.values()) * SIZE // (2 * (SIZE - 1))
            found.append((sum(counter.calls.values()), sent // MATRICES))
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Lamb, corrected", [(1, 8)]),
        ("Adafactor, rate", [(2, 4 * (ROWS + COLUMNS) + 8)]),
        ("CAME, decay", [(3, 2 * 4 * (ROWS + COLUMNS) + 4)]),
        ("GaLoreAdamW", [(3, 4 * (2 * COLUMNS + ROWS * COLUMNS + 2 * ROWS)), (1, 4 * 2 * COLUMNS)]),
    ],
)
def test_a_step_sends_what_the_docstring_says(name, expected) -> None:
    """Whatever the number of parameters, the sums of all of them travel together."""
    for found in run_threads(traffic, SIZE, name, len(expected)):
        assert found == expected


def test_each_rank_does_its_share_of_the_decompositions(monkeypatch) -> None:
    ranks = []
    original = Projection.of

    def count(*args) -> Projection:  # noqa: ANN002
        ranks.append(dist.get_rank())
        return original(*args)

    monkeypatch.setattr(Projection, "of", count)
    run_threads(traffic, SIZE, "GaLoreAdamW", 1)
    assert sorted(ranks) == [0, 0, 1]


# ------------------------------------------------------------------------------------------ casting, and refusals


@pytest.mark.parametrize("name", TWINS)
def test_casting_keeps_groups_state_and_schedules(name) -> None:
    params, through = ([nn.Parameter(whole) for whole in start()] for _ in range(2))
    plain, other = CASES[name].build(params), CASES[name].build(through)
    scheduler, same = StepLR(plain, 1, gamma=0.5), StepLR(other, 1, gamma=0.5)
    twin: Any = plain
    for step in ALL:
        if step == 3:
            twin = cast_to_distributed(plain)
            assert type(twin) is TWINS[name]
            twin.setup_distributed()
        for param, copy, grad in zip(params, through, grads_at(step), strict=True):
            param.grad, copy.grad = grad, grad
        twin.step()
        other.step()
        scheduler.step()
        same.step()
    for param, copy in zip(params, through, strict=True):
        assert torch.equal(param, copy)


def test_what_has_no_twin_stays() -> None:
    optimizer = CPUAdam([nn.Parameter(torch.ones(2))])
    assert cast_to_distributed(optimizer) is optimizer
    assert DistGaloreAdamW is DistGaloreAwamW


def lamb_of(*params: torch.Tensor) -> DistributedLamb:
    return DistributedLamb(params)


def test_shards_that_nobody_describes_are_refused() -> None:
    shard, work = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    with fake_world(2), ParallelMesh(dp=2) as mesh:
        group = mesh.group("dp")
        described: tuple[dict[str, Any], ...] = ({}, {"dp_group": group}, {"shard_to_working_param": {shard: work}})
        for arguments in described:
            with pytest.raises(ConfigError, match="Under ZeRO, dp_group and the working parameter"):
                lamb_of(shard).setup_distributed(is_zero=True, **arguments)
        with pytest.raises(ConfigError, match="Under ZeRO"):
            lamb_of(shard).setup_distributed(use_zero=True)
        lamb_of(shard).setup_distributed(use_zero=False, is_zero=True)
        lamb_of(shard).setup_distributed(None, group, {shard: work}, {work: 1}, is_zero=True)
        with pytest.raises(ShapeError, match="padding_map says 2"):
            lamb_of(shard).setup_distributed(None, group, {shard: work}, {work: 2}, is_zero=True)
        with pytest.raises(ShapeError, match="its 7 elements and the padding. Found 2 of 3"):
            lamb_of(shard).setup_distributed(None, group, {shard: nn.Parameter(torch.ones(7))}, is_zero=True)


def test_plain_tensors_among_tensor_parallel_ranks_are_refused() -> None:
    with fake_world(2), ParallelMesh(tp=2) as mesh:
        optimizer = lamb_of(nn.Parameter(torch.ones(2)))
        with pytest.raises(UnsupportedError, match="may be full or a shard. Make it a DTensor"):
            optimizer.setup_distributed(mesh.group("tp"))
    lamb_of(nn.Parameter(torch.ones(2))).setup_distributed()
    assert Lamb.__mro__[1] is DistributedLamb.__mro__[2]


def on_mixed_parameters(name: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, fulls = ParallelMesh(tp=2), start()
    sharded = {number for number, full in enumerate(fulls) if full.dim() > 1 and full.shape[0] % 2 == 0}
    assert 0 < len(sharded) < len(fulls)

    def placed(number: int, full: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(full, mesh.device_mesh["tp"], [Shard(0)]) if number in sharded else full

    params = [nn.Parameter(placed(number, full)) for number, full in enumerate(fulls)]
    optimizer = twin_of(name, params)
    optimizer.setup_distributed(mesh.group("tp"))
    for step in ALL:
        for number, (param, grad) in enumerate(zip(params, grads_at(step), strict=True)):
            param.grad = placed(number, grad)
        optimizer.step()
    for number, (param, wanted) in enumerate(zip(params, CASES[name].expected(), strict=True)):
        found = param.full_tensor() if number in sharded else param
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-10, atol=1e-12)
    params[min(set(range(len(fulls))) - sharded)].data.add_(mesh.rank("tp"))
    with pytest.raises(UnsupportedError, match="a plain tensor is full, and the same on all ranks of tp_group. Found"):
        optimizer.setup_distributed(mesh.group("tp"))


@pytest.mark.parametrize("name", TWINS)
def test_plain_tensors_next_to_tensor_parallel_ones_are_full(name) -> None:
    run_threads(on_mixed_parameters, 2, name)
