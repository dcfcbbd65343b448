# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportUnusedExpression=false
"""What the ranks say to each other, how often and how much, and that they find out when they used different chunks."""

from typing import Any

import pytest
import torch
from chunked import BATCHES, ROWS, WIDTH, Deep, assert_equal, draw, loss_of, model_of, own_rows, train_chunked, wrap
from torch import distributed as dist
from torch import nn

from colossal.comm import CommCounter
from colossal.errors import CommunicationError, UnsupportedError
from colossal.testing import fake_world, run_threads

DEPTH, LAYER = 6, WIDTH * WIDTH + WIDTH


def padded(numel: int, size: int) -> int:
    return -(-numel // size) * size


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def count_step(size: int, num_steps: int = 2, **options: Any) -> tuple[CommCounter, int, Any]:
    """Count what a step says after the first one; return the bytes of a chunk as well."""
    model, optimizer = wrap(model_of(lambda: Deep(DEPTH)), sgd, **({"chunk_numel": LAYER} | options))
    rows = BATCHES[0]
    for _ in range(num_steps - 1):
        optimizer.backward(loss_of(model, rows))
        optimizer.step()
        optimizer.zero_grad()
    with CommCounter() as counter:
        optimizer.backward(loss_of(model, rows))
        optimizer.step()
        optimizer.zero_grad()
    return counter, padded(LAYER, size) * 8, model.chunks


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("max_prefetch", [0, 1, 2])
def test_gathers_and_reductions_of_a_step(size: int, max_prefetch: int) -> None:
    """Each chunk is gathered twice, except those that are still there, and the first, which no gradient needs."""
    with fake_world(size):
        counter, chunk, _ = count_step(size, max_prefetch=max_prefetch)
    num_chunks = DEPTH + 1
    still_there = 2 + max_prefetch
    gathers = num_chunks + (num_chunks - 1 - still_there)
    share = (size - 1) / size
    assert counter.calls["all_gather", "dp"] == gathers
    assert counter.bytes["all_gather", "dp"] == pytest.approx(gathers * chunk * share, abs=gathers)
    assert counter.calls["reduce_scatter", "dp"] == num_chunks
    assert counter.bytes["reduce_scatter", "dp"] == pytest.approx(num_chunks * chunk * share, abs=num_chunks)
    assert counter.calls["all_reduce", "dp"] == 1
    agreed = 8 + 4 * (num_chunks + 2 * num_chunks)  # what each parameter and chunk is used for, and the order
    assert counter.bytes["all_reduce", "dp"] == pytest.approx(2 * agreed * share, abs=2)
    assert {op for op, _ in counter.calls} == {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.parametrize("chunk_numel", [1, LAYER, 3 * LAYER, 1000])
def test_what_is_said_does_not_depend_on_where_chunks_are(chunk_numel: int) -> None:
    with fake_world(4):
        counters = [
            count_step(4, chunk_numel=chunk_numel, **options)[0]
            for options in (
                {},
                {"offload_optim_frac": 1.0},
                {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
                {"enable_async_reduce": False},
            )
        ]
    assert all(each.calls == counters[0].calls and each.bytes == counters[0].bytes for each in counters)


def test_what_stays_whole_is_gathered_after_the_step() -> None:
    with fake_world(4):
        for options in ({"strict_ddp_mode": True}, {"shard_param_frac": 0.0}):
            counter, chunk, _ = count_step(4, **options)
            assert counter.calls["all_gather", "dp"] == DEPTH + 1
            assert counter.bytes["all_gather", "dp"] == (DEPTH + 1) * chunk * 3 // 4


def test_a_roomy_auto_policy_gathers_each_chunk_once() -> None:
    with fake_world(4):
        counter, _, chunks = count_step(4, placement_policy="auto", device_budget=10**6)
        assert counter.calls["all_gather", "dp"] == DEPTH + 1
        assert sum(chunk.full is not None for chunk in chunks.chunks) == 0, "old values are given back"


def test_accumulation_gathers_and_reduces_in_each_pass() -> None:
    with fake_world(2):
        model, optimizer = wrap(model_of(lambda: Deep(DEPTH)), sgd, chunk_numel=LAYER)
        with CommCounter() as counter:
            for _ in range(3):
                optimizer.backward(loss_of(model, BATCHES[0]))
        assert counter.calls["reduce_scatter", "dp"] == 3 * (DEPTH + 1)


def test_frozen_parameters_are_not_reduced() -> None:
    model = model_of(lambda: Deep(DEPTH))
    model.layers.requires_grad_(False)
    with fake_world(2), CommCounter() as counter:
        wrapped, optimizer = wrap(model, lambda _: sgd(wrapped_parameters(_)), chunk_numel=LAYER)
        optimizer.backward(loss_of(wrapped, BATCHES[0]))
        optimizer.step()
    assert counter.calls["reduce_scatter", "dp"] == 1


def wrapped_parameters(parameters: Any) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def test_state_is_gathered_once() -> None:
    with fake_world(4):
        model, _ = wrap(model_of(lambda: Deep(DEPTH)), None)
        with CommCounter() as counter:
            with torch.no_grad():
                model(BATCHES[0])
            model.eval()
            with torch.no_grad():
                model(BATCHES[0])
        assert counter.calls["all_gather", "dp"] == 2 * len(model.chunks.chunks)


# ------------------------------------------------------------------------------------------------- one order


class Forked(nn.Module):
    """Takes one of two ways of the same sizes, by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.ways[int(x[0, 0] > 0)](x)))


def fork(model: nn.Module, apart: bool, first_steps: int, **options: Any) -> tuple[str, bool]:
    wrapped, optimizer = wrap(model, sgd, chunk_numel=LAYER, **options)
    rows = BATCHES[0][:4].abs()
    for _ in range(first_steps):
        optimizer.backward(loss_of(wrapped, rows))
        optimizer.step()
        optimizer.zero_grad()
    before = wrapped.state_dict(only_rank_0=False)
    message = ""
    try:
        optimizer.backward(loss_of(wrapped, -rows if apart and dist.get_rank() else rows))
        optimizer.step()
    except CommunicationError as error:
        message = str(error)
    after = wrapped.state_dict(only_rank_0=False)
    return message, all(torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.parametrize("first_steps", [0, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_prefetch": 2}, {"placement_policy": "auto", "device_budget": 10**6}, {"enable_async_reduce": False}],
)
def test_ranks_that_go_different_ways_are_told_before_the_step(options: dict[str, Any], first_steps: int) -> None:
    model = model_of(Forked)
    for message, is_unchanged in run_threads(fork, 3, model, True, first_steps, **options):
        assert "Found that they gathered different chunks" in message
        assert "TorchDDPPlugin" in message
        assert is_unchanged
    assert all(message == "" for message, _ in run_threads(fork, 3, model, False, first_steps, **options))


def skip(model: nn.Module) -> str:
    """One rank takes a whole forward pass less: the others wait for it, and find out by the group."""
    wrapped, optimizer = wrap(model, sgd, chunk_numel=LAYER, strict_ddp_mode=True)
    optimizer.backward(loss_of(wrapped, BATCHES[0] if dist.get_rank() else BATCHES[0].abs()))
    optimizer.step()
    return "done"


def test_whole_chunks_may_be_used_in_any_order() -> None:
    assert run_threads(skip, 2, model_of(Forked)) == ["done"] * 2


def other_way(model: nn.Module) -> Any:
    """All ranks change their way from pass to pass, together."""
    wrapped, optimizer = wrap(model, sgd, chunk_numel=LAYER, placement_policy="auto", device_budget=20_000)
    for number in range(4):
        optimizer.backward(loss_of(wrapped, own_rows(BATCHES[0].abs() * (-1) ** (number // 2))))
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


def test_the_way_may_change_if_it_does_on_all_ranks() -> None:
    model = model_of(Forked)
    alone = model_of(Forked)
    for number in range(4):
        alone.zero_grad()
        loss_of(alone, BATCHES[0].abs() * (-1) ** (number // 2)).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    for state in run_threads(other_way, 2, model):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=name)


# ------------------------------------------------------------------------------------------------- what it remembers


def test_moves_are_remembered_on_demand() -> None:
    with fake_world(1):
        model, optimizer = wrap(
            model_of(lambda: Deep(DEPTH)), sgd, chunk_numel=LAYER, placement_policy="auto", device_budget=25_000
        )
        traffic = model.chunks.traffic
        optimizer.backward(loss_of(model, draw(3, ROWS, WIDTH)))
        assert traffic.moves == []
        optimizer.step()
        optimizer.zero_grad()
        traffic.is_recording = True
        optimizer.backward(loss_of(model, draw(3, ROWS, WIDTH)))
        gathers = [move for move in traffic.moves if move.event == "gather"]
        assert [move.chunk for move in gathers][: DEPTH + 1] == list(range(DEPTH + 1))
        assert all(move.num_bytes == LAYER * 8 for move in gathers)
        assert all(move.model_data + move.activations <= 25_000 for move in traffic.moves)
        assert [move.period for move in traffic.moves] == sorted(move.period for move in traffic.moves)


def test_bytes_that_move_between_the_tiers() -> None:
    options = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "chunk_numel": LAYER, "make": sgd}
    for size in (1, 2):
        ranks = run_threads(train_chunked, size, model_of(lambda: Deep(DEPTH)), BATCHES[:1], **options)
        for rank in ranks:
            chunk = LAYER * 8
            num_gathers = 2 * (DEPTH + 1) - 3
            assert rank["moved"]["upload"] == num_gathers * chunk // size
            assert rank["moved"]["download"] == (DEPTH + 1) * chunk // size
            assert rank["moved"]["reduce"] == (DEPTH + 1) * chunk
            assert rank["moved"].get("gather", 0) == (num_gathers * chunk if size > 1 else 0)


def test_parameters_can_not_be_read_between_passes_even_if_they_are_whole() -> None:
    with fake_world(2):
        model, _ = wrap(model_of(Deep), None, strict_ddp_mode=True)
        with pytest.raises(UnsupportedError, match="Between passes"):
            model.module.enter.weight + 1


def test_one_rank_alone_equals_two() -> None:
    model = model_of(Deep)
    (alone,) = run_threads(train_chunked, 1, model)
    assert_equal(run_threads(train_chunked, 2, model), alone)
