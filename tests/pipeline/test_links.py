# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Links: between whom, opened in which order, what goes over them, and what is said if one cannot be opened."""

import copy
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal._src.pipeline import (
    Microbatching,
    PipelineExecutor,
    PipelineStyle,
    RowLink,
    SharedParameter,
    Stage,
    copy_structure,
)
from colossal._src.pipeline.p2p import P2PLink, make_links, open_links, peer_pairs
from colossal._src.pipeline.schedule.p2p_messages import p2p_programs
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.errors import CommunicationError, ShapeError
from colossal.interface import OptimizerWrapper
from colossal.pipeline import SCHEDULES, StagePlacement, partition_uniform
from colossal.testing import WorldError, run_processes

pytestmark = pytest.mark.slow

WIDTH, NUMBER = 4, 4


def test_links_are_between_neighbours_and_ranks_that_share() -> None:
    assert peer_pairs(StagePlacement(4)) == [(0, 1), (1, 2), (2, 3)]
    assert peer_pairs(StagePlacement(4, 3)) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert peer_pairs(StagePlacement(4, 2, is_v=True)) == [(0, 1), (1, 2), (2, 3)]
    assert peer_pairs(StagePlacement(2, 2)) == [(0, 1)]
    assert peer_pairs(StagePlacement(1, 2)) == []
    tied = SharedParameter(("a", "b", "c"), (0, 1, 3))
    assert peer_pairs(StagePlacement(4), [tied]) == [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]


# ------------------------------------------------------------------------------------------ opening


class Calls:
    """The calls of `torch.distributed` that send and receive, in their order."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        for name in ("isend", "irecv"):
            setattr(dist, name, self._record(name, getattr(dist, name)))

    def _record(self, name: str, function: Any) -> Any:
        def call(tensor: torch.Tensor, peer: int, *args: Any, **kwargs: Any) -> Any:
            self.found.append((name, peer))
            return function(tensor, peer, *args, **kwargs)

        return call


def open_all() -> list[tuple[str, int]]:
    """A ring of four, whose links are opened as on an accelerator; then each rank sends along it."""
    with ParallelMesh(pp=4) as mesh:
        links = make_links(mesh, peer_pairs(StagePlacement(4, 2)))
        calls = Calls()
        open_links(list(links.values()), mesh.global_rank, mesh.accelerator, seconds=20)
        own = mesh.rank("pp")
        links[(own + 1) % 4].send(torch.tensor([own]))
        links[(own - 1) % 4].post(found := torch.empty(1, dtype=torch.int64)).wait()
        assert found.item() == (own - 1) % 4
        for link in links.values():
            link.drain()
    return calls.found


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_links_are_opened_both_ways_in_the_order_of_the_pairs(backend) -> None:
    found = run_processes(open_all, 4, environment={"COLOSSAL_BACKEND": backend})
    pairs = peer_pairs(StagePlacement(4, 2))
    for own, calls in enumerate(found):
        peers = [sum(pair) - own for pair in pairs if own in pair]
        expected = [
            (name, peer) for peer in peers for name in (("isend", "irecv") if own < peer else ("irecv", "isend"))
        ]
        assert calls[:-2] == expected


def come_late() -> str:
    """Rank 1 comes when the others have given up."""
    with ParallelMesh(pp=3) as mesh:
        links = list(make_links(mesh, peer_pairs(StagePlacement(3))).values())
        found = ""
        if mesh.rank("pp") == 1:
            time.sleep(3)
            open_links(links, mesh.global_rank, mesh.accelerator, seconds=20)
        else:
            with pytest.raises(CommunicationError) as caught:
                open_links(links, mesh.global_rank, mesh.accelerator, seconds=0.1)
            found = str(caught.value)
        dist.barrier()  # nobody ends while a thread that was given up still waits
    return found


def test_a_link_that_is_not_opened_in_time_is_named() -> None:
    first, _, last = run_processes(come_late, 3)
    assert "Found that ranks 0 and 1 could not within 0.1 s; what rank 0 saw of rank 1: it did not answer." in first
    assert "Look for the first error of rank 1." in first
    assert "Found that ranks 1 and 2 could not within 0.1 s" in last


def leave() -> str:
    with ParallelMesh(pp=2) as mesh:
        links = list(make_links(mesh, [(0, 1)]).values())
        if mesh.rank("pp") == 1:
            raise KeyError("gone")
        open_links(links, mesh.global_rank, mesh.accelerator, seconds=20)
    return ""


def test_a_link_to_a_rank_that_is_gone_is_named() -> None:
    with pytest.raises(WorldError, match="ranks 0 and 1 could not within 20 s; what rank 0 saw of rank 1: .*has left"):
        run_processes(leave, 2, timeout_seconds=20, environment={"COLOSSAL_BACKEND": "shm"})


def cross() -> str:
    """Both ranks come, to other links: what rank 0 takes for its second link is the first one of rank 1."""
    with ParallelMesh(pp=2) as mesh:
        links = make_links(mesh, [(0, 1)])
        own, (link,) = mesh.rank("pp"), links.values()
        try:
            open_links([link], own + 5 * own, mesh.accelerator, seconds=5)
        except CommunicationError as error:
            return str(error)
    return ""


def test_a_link_to_another_rank_is_found() -> None:
    assert "what rank 0 saw of rank 1: it answers as rank 6." in run_processes(cross, 2)[0]


# ------------------------------------------------------------------------------------------ what goes over them


DTYPES = [
    torch.int16, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(2, 3), (), (0, 2)]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) * 257 - 300).to(dtype)


def send_all() -> list[bool]:
    """Whether each tensor has the same bits on the other side."""
    same: list[bool] = []
    with ParallelMesh(pp=2) as mesh:
        links = make_links(mesh, [(0, 1)])
        for dtype in DTYPES:
            for shape in SHAPES:
                if mesh.rank("pp") == 0:
                    links[1].send(values(shape, dtype))
                else:
                    links[0].post(found := torch.empty(shape, dtype=dtype)).wait()
                    here, there = (each.reshape(-1).view(torch.uint8) for each in (found, values(shape, dtype)))
                    same.append(torch.equal(here, there))
        for link in links.values():
            link.drain()
    return same


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_dtype_arrives_bit_by_bit(backend) -> None:
    _, same = run_processes(send_all, 2, environment={"COLOSSAL_BACKEND": backend})
    assert same == [True] * len(DTYPES) * len(SHAPES)


class Counter(nn.Module):
    """Hands hidden states on, and numbers of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, numbers = x if isinstance(x, tuple) else (x, torch.tensor([-300, 300], dtype=torch.int16))
        return self.linear(x), numbers * 2


def hand_on() -> list[Any]:
    with ParallelMesh(pp=2) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(Counter(), Counter())
        stage = Stage.of_sequential(model, [range(1), range(1, 2)], mesh.rank("pp"))
        run = PipelineExecutor([stage], StagePlacement(2), mesh, "1f1b", Microbatching(2))
        optimizer = OptimizerWrapper(torch.optim.SGD(stage.parameters()))
        done = run(iter([torch.ones(2, WIDTH)]), lambda y, _: y[0].mean(), optimizer, return_outputs=True)
    return [done["outputs"] and done["outputs"][1]]


def test_numbers_of_16_bits_are_handed_on() -> None:
    _, (found,) = run_processes(hand_on, 2)
    assert found.tolist() == [-1200, 1200, -1200, 1200]
    assert found.dtype == torch.int16


# ------------------------------------------------------------------------------------------ a step


def tied() -> nn.Sequential:
    """Four layers, of which the first and the third are one, and the second and the fourth: in a V they cross."""
    torch.manual_seed(1)
    first, second = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2))
    return nn.Sequential(first, second, first, second)


def loss_of(y: torch.Tensor, _: Any) -> torch.Tensor:
    return (y * torch.arange(WIDTH)).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(2 * NUMBER, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def step(style: PipelineStyle, size: int) -> tuple[list[tuple[str, int]], dict[str, torch.Tensor]]:
    """What a rank does to its links in a first step and in a second one, and the gradients that it has then."""
    placement = StagePlacement(size, 4 // size, is_v=style == "zbv")
    calls: list[tuple[str, int]] = []
    with ParallelMesh(pp=size) as mesh:
        own = mesh.rank("pp")
        model, layers = tied(), partition_uniform(4, 4)
        stages = []
        for index in placement.stages_of(own):
            part = copy_structure(model)
            assert isinstance(part, nn.Sequential)
            stages.append(Stage.of_sequential(part, layers, index))
        run = PipelineExecutor(stages, placement, mesh, style, Microbatching(NUMBER))
        optimizer = OptimizerWrapper(torch.optim.SGD([p for stage in stages for p in stage.parameters()]))
        for name, plain in (("send", P2PLink.send), ("post", P2PLink.post)):

            def call(link: P2PLink, tensor: torch.Tensor, name: str = name, plain: Any = plain) -> Any:
                calls.append((name, link.peer))
                return plain(link, tensor)

            setattr(P2PLink, name, call)
        for _ in range(2):
            run(iter([batch()]), loss_of, optimizer)
        grads = {name: p.grad for stage in stages for name, p in stage.module.named_parameters()}
    return calls, copy.deepcopy(grads)


@pytest.mark.parametrize(("style", "size"), [("1f1b", 4), ("interleaved", 2), ("zbv", 2)])
def test_what_ranks_do_is_what_is_checked(style, size) -> None:
    placement = StagePlacement(size, 4 // size, is_v=style == "zbv")
    shared = [SharedParameter(("0.weight", "2.weight"), (0, 2)), SharedParameter(("1.weight", "3.weight"), (1, 3))]
    shared = [each for each in shared if len(each.ranks(placement)) > 1]
    orders = SCHEDULES[style](placement, NUMBER)
    programs = [p2p_programs(orders, placement, shared, is_first) for is_first in (True, False)]
    model = tied()
    for x in batch().chunk(NUMBER) * 2:
        (loss_of(model(x), None) / NUMBER).backward()
    for rank, (calls, grads) in enumerate(run_processes(step, size, style, size)):
        assert calls == [(each.kind, each.peer) for own in programs for each in own[rank] if each.kind != "wait"]
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


def test_pairs_ascend() -> None:
    pairs = peer_pairs(StagePlacement(8, 3), [SharedParameter(("a", "b"), (0, 21))])
    assert all(one < other for one, other in pairwise(pairs))
    assert (0, 5) in pairs


# ------------------------------------------------------------------------------------------ rows


def send_rows() -> list[torch.Tensor]:
    """Of other numbers of rows each time, in bfloat16 and in two directions."""
    sizes = [(2, 3), (5, 1), (2, 3)]
    rows = [torch.full((*each, WIDTH), index, dtype=torch.bfloat16) for index, each in enumerate(sizes)]
    with CommCounter() as counter:
        [(other, of_bytes)] = make_links(ParallelMesh(pp=2), [(0, 1)]).items()
        link = RowLink(of_bytes)
        if other == 0:
            found = [link.receive(*each) for each in sizes]
            link.send(found[-1][0])
            return found
        for each in rows:
            link.send(each)
        with pytest.raises(ShapeError, match=f"Found 3 features in torch.float32 after {WIDTH} in torch.bfloat16"):
            link.send(torch.zeros(2, 3))
        num_bytes = sum(2 * each.numel() for each in rows)
        assert counter.bytes["send", "pp"] == num_bytes + 512, "shapes are sent once"
        return [*rows, link.receive(sizes[-1][1])]


def test_rows_are_sent_without_their_shapes() -> None:
    sent, received = run_processes(send_rows, 2)
    for one, other in zip(sent[:3], received, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert torch.equal(sent[3], received[2][0])
