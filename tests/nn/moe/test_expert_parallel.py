"""Tokens reach their experts and come back: equal to a loop over experts, with any numbers of tokens."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from equality import assert_equal
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from colossal._src.nn.moe import ExpertParallel
from colossal.cluster import ParallelMesh
from colossal.comm import Channel, CommCounter
from colossal.errors import ConfigError, PlanError
from colossal.nn.moe import Capacity, MixtureOfExperts, Router, combine, dispatch, shard_experts
from colossal.testing import fake_world, run_processes, run_threads

WIDTH, NUM_EXPERTS = 3, 4
NUM_TOKENS = {"even": (5, 5), "uneven": (7, 2), "a rank without tokens": (6, 0)}
CHOICES = {
    "all experts": (0, 1, 2, 3),
    "an unused expert": (0, 1, 3),
    "one rank's experts only": (0, 1),  # nothing arrives at the other
}


class Experts(nn.Module):
    """As Hugging Face stores them, each a matrix."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.num_experts = NUM_EXPERTS
        self.table = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            at, which = (chosen == expert).nonzero(as_tuple=True)
            if len(at):  # as of Hugging Face: an expert without tokens computes nothing
                out = functional.silu(tokens[at]) @ self.table[expert]
                result = result.index_add(0, at, out * weights[at, which, None])
        return result


def routing(numbers: tuple[int, ...], among: tuple[int, ...], seed: int = 1) -> Any:
    """Tokens, two different experts for each, and weights; for each rank."""
    draw = torch.Generator().manual_seed(seed)
    for number in numbers:
        tokens = torch.randn(number, WIDTH, generator=draw, dtype=torch.float64)
        order = torch.rand(number, len(among), generator=draw).argsort(1)[:, :2]
        weights = torch.rand(number, 2, generator=draw, dtype=torch.float64)
        yield tokens, torch.tensor(among)[order], weights


def run(experts: nn.Module, parts: list[Any]) -> dict[str, torch.Tensor]:
    """Results and gradients of one call on joined tokens."""
    tokens, chosen, weights = (torch.cat(each) for each in zip(*parts, strict=True))
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    result = experts(tokens, chosen, weights)
    result.square().sum().backward()
    grads = {"tokens": tokens.grad, "weights": weights.grad, "table": experts.get_parameter("table").grad}
    return {"result": result.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def run_sharded(numbers: tuple[int, ...], among: tuple[int, ...], exchange: Any) -> dict[str, torch.Tensor]:
    with ParallelMesh(ep=len(numbers)) as mesh:
        experts = shard_experts(Experts(), mesh, exchange)
        assert isinstance(experts, ExpertParallel)
        return run(experts, [list(routing(numbers, among))[mesh.rank("ep")]])


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("among", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("numbers", NUM_TOKENS.values(), ids=NUM_TOKENS)
def test_equals_one_process(numbers: tuple[int, ...], among: tuple[int, ...], exchange: str) -> None:
    expected = run(Experts(), list(routing(numbers, among)))
    found = run_processes(run_sharded, 2, numbers, among, exchange)
    assert all(rank.keys() == expected.keys() for rank in found)  # zeros where nothing arrives, not None
    for name, value in expected.items():
        assert_equal(torch.cat([rank[name] for rank in found]), value, name)


def run_over_tp(number: int, exchange: Any) -> dict[str, torch.Tensor]:
    with ParallelMesh(tp=2, ep=2) as mesh:
        found = run(shard_experts(Experts(), mesh, exchange), list(routing((number,), CHOICES["all experts"])))
        return found | {"rank": torch.tensor(mesh.rank("ep"))}


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("number", [4, 5, 1])
def test_ranks_with_the_same_tokens_dispatch_a_part_each(number: int, exchange: str) -> None:
    expected = run(Experts(), list(routing((number,), CHOICES["all experts"])))
    for rank in run_processes(run_over_tp, 2, number, exchange):
        for name in ("result", "tokens", "weights"):
            assert_equal(rank[name], expected[name], name)
        assert_equal(rank["table"], expected["table"].chunk(2)[int(rank["rank"])], "table")


def count_bytes() -> tuple[int, int, int, int]:
    with ParallelMesh(ep=2) as mesh, CommCounter() as counter:
        tokens, chosen, weights = list(routing((7, 2), CHOICES["all experts"]))[mesh.rank("ep")]
        arrived = dispatch(tokens.requires_grad_(), chosen, NUM_EXPERTS, mesh)
        sent = counter.bytes["all_to_all", "ep"]
        combine(arrived.rows, weights, arrived).sum().backward()
        leaving = int((chosen // 2 != mesh.rank("ep")).sum())
        return sent, counter.bytes["all_to_all", "ep"] - sent, leaving, counter.calls["all_to_all", "ep"]


def test_only_rows_that_leave_a_rank_are_sent() -> None:
    row_bytes, counts_bytes = WIDTH * 8, NUM_EXPERTS * 8 // 2
    ranks = run_processes(count_bytes, 2)
    coming = [ranks[1][2], ranks[0][2]]  # of two ranks, what leaves one comes to the other
    for (sent, later, leaving, calls), arriving in zip(ranks, coming, strict=True):
        assert sent == counts_bytes + leaving * row_bytes
        assert later == (arriving + leaving + arriving) * row_bytes  # results, then the gradients of both
        assert calls == 5


def count_gathered_bytes() -> dict[Any, int]:
    with ParallelMesh(ep=2) as mesh, CommCounter() as counter:
        own = list(routing((7, 2), CHOICES["all experts"]))[mesh.rank("ep")]
        run(shard_experts(Experts(), mesh, "all_gather"), [own])
        return dict(counter.bytes)


def test_gathered_tokens_travel_once() -> None:
    of_tokens, of_weights = 7 * WIDTH * 8, 7 * 2 * 8  # of the rank that has most, once to the other rank
    for sent in run_processes(count_gathered_bytes, 2):
        # of results, and of the gradients of tokens and weights
        assert sent["reduce_scatter", "ep"] == 2 * of_tokens + of_weights
        # of lengths, tokens, weights, choices, and the gradients of results
        assert sent["all_gather", "ep"] == 8 + 2 * of_tokens + 2 * of_weights


def test_other_ways_to_experts_are_refused() -> None:
    with fake_world(2), pytest.raises(ConfigError, match="all_to_all, all_gather. Found 'broadcast'. Pass one"):
        shard_experts(Experts(), ParallelMesh(ep=2), "broadcast")  # pyright: ignore[reportArgumentType]


def test_a_layer_says_how_tokens_come_to_experts_that_are_sharded_later() -> None:
    def layer() -> nn.Module:
        return MixtureOfExperts(Router(WIDTH, NUM_EXPERTS, 2), Experts(), exchange="all_gather").experts

    with fake_world(2):
        mesh = ParallelMesh(ep=2)
        found = [
            shard_experts(layer(), mesh),
            shard_experts(layer(), mesh, "all_to_all"),
            shard_experts(Experts(), mesh),
        ]
    assert [each.exchange for each in found] == ["all_gather", "all_to_all", "all_to_all"]


def test_twice_differentiable() -> None:
    def program() -> bool:
        with ParallelMesh(ep=2) as mesh:
            tokens, chosen, weights = next(routing((3,), CHOICES["all experts"], seed=mesh.rank("ep")))

            def both(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
                arrived = dispatch(x, chosen, NUM_EXPERTS, mesh)
                return combine(arrived.rows.square(), by, arrived).sum()

            arguments = tokens.requires_grad_(), weights.requires_grad_()
            first = torch.autograd.grad(both(*arguments), arguments, create_graph=True)
            (second,) = torch.autograd.grad(first[0].square().sum(), arguments[:1])
            # w x^2 has the gradient 2 w x: its square has 8 (sum of w)^2 x
            return torch.allclose(second, 8 * weights.sum(1, keepdim=True).square() * tokens)

    assert run_threads(program, 2) == [True, True]


def test_more_than_one_number_per_token_keeps_the_dtype() -> None:
    with fake_world(1), ParallelMesh() as mesh:
        arrived = dispatch(
            torch.ones(2, WIDTH, dtype=torch.bfloat16), torch.tensor([[1, 0], [1, 2]]), NUM_EXPERTS, mesh
        )
        assert arrived.counts == (1, 2, 1, 0)
        assert arrived.expert_of_row.tolist() == [0, 1, 1, 2]
        assert combine(arrived.rows, torch.full((2, 2), 0.5), arrived).dtype == torch.bfloat16


class Shared(nn.Module):
    """A module whose passes are noted, next to the collectives."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.layer, self.events = nn.Linear(WIDTH, WIDTH).double(), events

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.events.append("shared")
        result = self.layer(tokens)
        result.register_hook(lambda _: self.events.append("shared, backward"))
        return result


def mix(numbers: tuple[int, ...], mesh: ParallelMesh | None, events: list[str], capacity: Capacity | None) -> Any:
    """Results and gradients of a layer with a shared module, for all tokens or those of this rank."""
    torch.manual_seed(0)
    router = Router(WIDTH, NUM_EXPERTS, 2, capacity=capacity, mesh=mesh).double()
    layer = MixtureOfExperts(router, Experts(), Shared(events), mesh=mesh)
    tokens = [tokens for tokens, *_ in routing(numbers, CHOICES["all experts"])]
    parts = tokens if mesh is None else tokens[mesh.rank("ep") :][:1]
    outputs, inputs = list[torch.Tensor](), [part.clone().requires_grad_() for part in parts]
    for part in inputs:  # a capacity is that of the tokens of a rank
        outputs.append(layer(part)[0])
    torch.stack([output.square().sum() for output in outputs]).sum().backward()
    grads = {name: each.grad for name, each in layer.named_parameters()} | {
        "tokens": torch.cat([p.grad for p in inputs])
    }
    return {"result": torch.cat(outputs).detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def mix_on_ranks(numbers: tuple[int, ...], capacity: Capacity | None) -> Any:
    events, exchanged = list[str](), dist.all_to_all_single

    class Noted:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("wait")
            self.work.wait()

    def note(*args: Any, **kwargs: Any) -> Any:
        work = exchanged(*args, **kwargs)
        events.append("start" if kwargs.get("async_op") else "exchange")
        return Noted(work) if kwargs.get("async_op") else work

    with ParallelMesh(ep=len(numbers)) as mesh, patch.object(dist, "all_to_all_single", note):
        return mix(numbers, mesh, events, capacity), events


@pytest.mark.parametrize("capacity", [None, Capacity(train=0.5, minimum=2)], ids=["dropless", "overflow"])
@pytest.mark.parametrize("numbers", NUM_TOKENS.values(), ids=NUM_TOKENS)
def test_shared_experts_are_computed_while_tokens_travel(numbers: tuple[int, ...], capacity: Capacity | None) -> None:
    expected = mix(numbers, None, [], capacity)
    found = run_processes(mix_on_ranks, 2, numbers, capacity)
    for values, events in found:
        forward = ["exchange", "start", "shared", "wait", "exchange"]  # counts; tokens; results
        assert events == [*forward, "exchange", "start", "shared, backward", "wait"]
        assert values.keys() == expected.keys()
    for name, value in expected.items():
        of_ranks = [values[name] for values, _ in found]
        is_sum = name.startswith(("router", "shared"))
        assert_equal(torch.stack(of_ranks).sum(0) if is_sum else torch.cat(of_ranks), value, name)


def test_exchanges_with_something_meanwhile_are_twice_differentiable() -> None:
    def program() -> bool:
        with ParallelMesh(ep=2) as mesh:
            tokens, chosen, weights = next(routing((3,), CHOICES["all experts"], seed=mesh.rank("ep")))
            found: list[torch.Tensor] = []
            tokens.requires_grad_()
            arrived = dispatch(tokens, chosen, NUM_EXPERTS, mesh, meanwhile=lambda: found.append(tokens.square()))
            total = combine(arrived.rows.square(), weights, arrived).sum() + found[0].sum()
            (first,) = torch.autograd.grad(total, tokens, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), tokens)
            factors = 2 * (weights.sum(1, keepdim=True) + 1)
            return torch.allclose(first, factors * tokens) and torch.allclose(second, 2 * factors.square() * tokens)

    assert run_threads(program, 2) == [True, True]


@pytest.mark.parametrize("number", [4, -1])
def test_unknown_experts_are_refused(number: int) -> None:
    with fake_world(1), ParallelMesh() as mesh, pytest.raises(PlanError, match=f"Found numbers from .*{number}"):
        dispatch(torch.ones(2, WIDTH), torch.tensor([[0], [number]]).sort(0)[0], NUM_EXPERTS, mesh)


def test_experts_that_do_not_divide_are_refused() -> None:
    with fake_world(3), pytest.raises(PlanError, match=r"Found 4 experts and .*ep=3.* Pass one of 1, 2, 4 as ep"):
        shard_experts(Experts(), ParallelMesh(ep=3))


def test_more_ranks_than_experts_are_refused() -> None:
    message = (
        r"one or more experts. Found 4 experts and .*ep=8.* Pass ep=4, so that .* copies .* tp_size without ep_size"
    )
    with fake_world(8), pytest.raises(PlanError, match=message):
        shard_experts(Experts(), ParallelMesh(ep=8))


def run_copies() -> dict[str, torch.Tensor]:
    """What more ranks than experts are for: with copies of experts, each for the tokens of some ranks."""
    with ParallelMesh(ep=NUM_EXPERTS) as mesh:
        own = routing((3,) * mesh.world_size, CHOICES["all experts"])
        found = run(shard_experts(Experts(), mesh), [list(own)[mesh.global_rank]])
        return found | {"table": Channel("edp", mesh).all_reduce(found["table"])}


@pytest.mark.slow
def test_ranks_that_have_copies_of_an_expert() -> None:
    expected = run(Experts(), list(routing((3,) * 8, CHOICES["all experts"])))
    found = run_processes(run_copies, 8)
    for name in ("result", "tokens", "weights"):
        assert_equal(torch.cat([rank[name] for rank in found]), expected[name], name)
    assert_equal(torch.cat([rank["table"] for rank in found[:NUM_EXPERTS]]), expected["table"], "table")


def test_experts_that_are_stored_otherwise_are_refused() -> None:
    layers: Any = nn.ModuleList([nn.Linear(2, 2) for _ in range(NUM_EXPERTS)])
    with fake_world(2):
        mesh = ParallelMesh(ep=2)
        with pytest.raises(PlanError, match="Found ModuleList with num_experts=None and 0.weight"):
            shard_experts(layers, mesh)
        layers.num_experts = NUM_EXPERTS
        with pytest.raises(PlanError, match=r"0.weight \(2, 2\).*Store the weights of all experts in one parameter"):
            shard_experts(layers, mesh)
        assert shard_experts(layers, ParallelMesh()) is layers
