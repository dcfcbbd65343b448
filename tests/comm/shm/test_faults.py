"""What goes wrong on one rank ends in an error on all, which names it, and nothing waits for ever."""

import mmap
import os
import re
import resource
import signal
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Timer
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from colossal._src.testing.processes import WorldError
from colossal.errors import CommunicationError, ShapeError, UnsupportedError
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

MB = 1 << 20
COLLECTIVE = "A collective needs all ranks of its group"
MESSAGE = "A message needs both its ranks"
ENDED = "{needed}. Found that rank {rank} (process {pid}) has ended. Look for the first error there."
LEFT = (
    "{needed}. Found that rank {rank} has left the group. "
    "Look for an error there, or for a collective that only some ranks call, as in a loop in which one rank has a "
    "batch more: give all ranks as many, by a DistributedSampler or drop_last=True."
)
LATE = (
    "{needed} within {seconds} s. Found that {ranks} did not come. "
    "Look for what was done there instead, or pass a larger timeout to launch."
)
TO_LATE_RANK = (
    "{needed} within 2 s. Found that rank {finder} waited for this rank. "
    "Look for what this rank did instead, or which rank it waited for itself, or pass a larger timeout to launch."
)
CLOSED = "{needed}. Found that this rank has left it. Communicate before destroy_process_group()."
MISMATCH = (
    "All ranks of a group must call the same collective with the same sizes and dtype. "
    "Found that {found}. Look for a branch or a shape that depends on the rank."
)
EXPECTED = "What a rank sends must be what the other expects. Found that rank {origin} {found}. {advice}"


def failure(call: Callable[[], object], kind: type[Exception] = CommunicationError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def text_of_future(future: Any) -> str:
    """Return what a future raises, which torch makes an error of C++, with the class in its text."""
    return failure(future.wait, RuntimeError).splitlines()[0].partition("CommunicationError: ")[2]


def group_of(*ranks: int, seconds: float | None = None) -> Any:
    return dist.new_group(list(ranks) or None, timeout=None if seconds is None else timedelta(seconds=seconds))


def total(size: int, group: Any) -> float:
    """Return a sum of ones, which shows that a group works."""
    value = torch.ones(size)
    dist.all_reduce(value, group=group)
    return value.mean().item()


# --------------------------------------------------------------------------------------------------- death


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def memory_with_a_hole() -> torch.Tensor:
    """Return a tensor of 16 MB whose second half is not there: who reads it is ended by the kernel."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryFile() as file:
        file.truncate(16 * MB)
        content = mmap.mmap(file.fileno(), 16 * MB)
        file.truncate(8 * MB)
    return torch.frombuffer(content, dtype=torch.int32)


def die_one_after_another() -> None:
    rank, pids = dist.get_rank(), [0] * 5
    dist.all_gather_object(pids, os.getpid())
    heirs, four, three, pair = group_of(0, 4), group_of(0, 1, 2, 3), group_of(0, 1, 2), group_of(0, 1)
    ended = [{"rank": each, "pid": pid} for each, pid in enumerate(pids)]
    if rank == 4:
        dist.send(torch.arange(7.0), 0, group=heirs)
        die()
    assert failure(lambda: dist.all_reduce(torch.ones(3))) == ENDED.format(needed=COLLECTIVE, **ended[4])
    assert failure(dist.barrier) == ENDED.format(needed=COLLECTIVE, **ended[4])
    assert failure(lambda: dist.recv(torch.ones(3), rank ^ 1)) == ENDED.format(needed=MESSAGE, **ended[4])
    if rank == 0:
        check_what_is_left_behind(heirs, ENDED.format(needed=MESSAGE, **ended[4]))
    assert total(3, four) == 4.0
    content = memory_with_a_hole() if rank == 3 else torch.ones(4 * MB, dtype=torch.int32)
    assert failure(lambda: dist.all_reduce(content, group=four)) == ENDED.format(needed=COLLECTIVE, **ended[3])
    if rank == 2:
        Timer(0.1, die).start()
    forever = failure(lambda: [dist.all_reduce(content, dist.ReduceOp.MAX, three) for _ in iter(int, 1)])
    assert forever == ENDED.format(needed=COLLECTIVE, **ended[2])
    if rank == 1:
        Timer(0.1, die).start()
    works: list[Any] = [dist.irecv(torch.ones(3), 1 - rank, group=pair, tag=tag) for tag in range(2)]
    assert failure(works[1].wait) == ENDED.format(needed=MESSAGE, **ended[1])
    assert failure(works[0].wait) == ENDED.format(needed=MESSAGE, **ended[1])
    assert all(work.is_completed() for work in works)


def check_what_is_left_behind(group: Any, ended: str) -> None:
    """What a rank has sent before its end arrives, and nothing else does."""
    content = torch.zeros(7)
    dist.recv(content, 4, group=group)
    assert torch.equal(content, torch.arange(7.0))
    assert failure(lambda: dist.recv(content, 4, group=group)) == ended


def test_the_end_of_a_rank_is_an_error_of_all_others_at_once(monkeypatch) -> None:
    """At once: ranks that waited for their timeout of a minute would not come to an end within the grace period."""
    monkeypatch.setattr("colossal._src.testing.processes.GRACE_SECONDS", 25.0)  # from the first death, of four
    with pytest.raises(WorldError) as caught:
        run_processes(die_one_after_another, 5, fresh=True)
    reports = [line for line in str(caught.value).splitlines() if line]
    assert re.match(r"Rank [1-4] of 5: The process died with exit code -[79]\.", reports[0])
    assert reports[1] == "4 of 5 processes failed, the first one first."
    assert set(reports[2:]) == {
        *(f"Rank {rank}: The process died with exit code -9." for rank in (1, 2, 4)),
        "Rank 3: The process died with exit code -7.",
    }


def step_without_a_rank(hook: str) -> None:
    """DDP waits for its buckets in C++, where an exception that is only a value would be taken for tensors."""
    rank, pids = dist.get_rank(), [0, 0]
    dist.all_gather_object(pids, os.getpid())
    model: Any = DistributedDataParallel(nn.Linear(5, 3))
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    for _ in range(2):  # the second forward pass makes new buckets
        loss = model(torch.ones(2, 5)).sum()
        loss.backward()
    loss = model(torch.ones(2, 5)).sum()
    dist.barrier()
    if rank == 1:
        die()
    assert ENDED.format(needed=COLLECTIVE, rank=1, pid=pids[1]) in failure(loss.backward, RuntimeError)


@pytest.mark.parametrize("hook", ["", "allreduce_hook"])
def test_a_backward_pass_without_a_rank_raises_and_does_not_crash(hook) -> None:
    with pytest.raises(WorldError) as caught:
        run_processes(step_without_a_rank, 2, hook, fresh=True)
    assert str(caught.value).splitlines()[-1] == "Rank 1: The process died with exit code -9."


# --------------------------------------------------------------------------------------------------- delay


def stall() -> None:
    rank, seconds = dist.get_rank(), 2.0
    groups = [group_of(0, 2, 3, seconds=seconds) for _ in range(3)]
    pairs = [group_of(0, 2, seconds=seconds) for _ in range(2)]
    late = LATE.format(needed=COLLECTIVE, seconds=2, ranks="rank 2")
    late_message = LATE.format(needed=MESSAGE, seconds=2, ranks="rank 2")
    begun = [
        lambda: dist.all_reduce(torch.ones(MB), group=groups[0], async_op=True),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.PRODUCT, groups[1], async_op=True),
        lambda: dist.broadcast(torch.ones(3), 0, groups[2], async_op=True),
    ]
    dist.barrier()
    if rank in (0, 3):
        works = [begin() for begin in begun]
        futures = [work.get_future() for work in works]
        if rank == 0:
            message, large = torch.ones(3), torch.ones(MB)
            works_of_messages: list[Any] = [
                dist.irecv(message, 2, group=pairs[0]),
                dist.isend(large, 2, group=pairs[1]),
            ]
            assert [failure(work.wait) for work in works_of_messages] == [late_message] * 2
        assert [failure(work.wait) for work in works] == [late] * 3
        assert [text_of_future(future) for future in futures] == [late] * 3
        assert all(work.is_completed() and not work.is_success() for work in works)
        assert failure(lambda: dist.all_reduce(torch.ones(5), group=groups[0])) == late
    dist.barrier()
    if rank == 2:
        told = [TO_LATE_RANK.format(needed=COLLECTIVE, finder=finder) for finder in (0, 3)]
        assert all(failure(begin().wait) in told for begin in begun)
        told_of_message = TO_LATE_RANK.format(needed=MESSAGE, finder=0)
        assert failure(lambda: dist.send(torch.ones(3), 0, group=pairs[0])) == told_of_message
        work: Any = dist.irecv(torch.ones(3), 0, group=pairs[1])
        assert text_of_future(work.get_future()) == told_of_message
    assert total(3, dist.group.WORLD) == 4.0


def test_a_rank_that_does_not_come_is_named_on_all_and_told_itself() -> None:
    run_processes(stall, 4, fresh=True)


def leave_early() -> None:
    rank = dist.get_rank()
    three, pair, quiet, queue = group_of(1, 2, 3), group_of(1, 2), group_of(2, 3), group_of(1, 2)
    left = LEFT.format(needed=COLLECTIVE, rank=2)
    works: list[Any] = []
    if rank == 1:
        works = [dist.all_reduce(torch.ones(3), group=queue, async_op=True) for _ in range(3)]
    if rank == 2:
        for group in (three, pair, quiet, queue):
            dist.destroy_process_group(group)
        work = quiet.barrier()
        assert failure(lambda: work.wait(timedelta(seconds=30))) == CLOSED.format(needed=COLLECTIVE)
        assert failure(lambda: quiet.recv([torch.ones(3)], 1, 0).wait()) == CLOSED.format(needed=MESSAGE)
    if rank in (1, 3):
        assert failure(lambda: dist.all_reduce(torch.ones(3), group=three)) == left
        assert failure(lambda: dist.barrier(three)) == left
    if rank == 1:
        assert failure(lambda: dist.recv(torch.ones(3), 2, group=pair)) == LEFT.format(needed=MESSAGE, rank=2)
        assert [failure(work.wait) for work in works] == [left] * 3
    assert total(3, dist.group.WORLD) == 4.0


def test_a_rank_that_leaves_early_is_named() -> None:
    run_processes(leave_early, 4, fresh=True)


# --------------------------------------------------------------------------------------------------- mismatch

Call = Callable[[Any], object]
PRODUCT, BAND, MAX = dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND, dist.ReduceOp.MAX


def parts(size: int, count: int = 2) -> list[torch.Tensor]:
    return [torch.ones(size) for _ in range(count)]


MISMATCHES: Sequence[tuple[tuple[Call, str], tuple[Call, str]]] = (
    (
        (lambda group: dist.all_reduce(torch.ones(3), group=group), "all_reduce of 3 x float32 by sum"),
        (dist.barrier, "barrier"),
    ),
    (
        (lambda group: dist.all_reduce(torch.ones(3), group=group), "all_reduce of 3 x float32 by sum"),
        (lambda group: dist.all_reduce(torch.ones(MB), group=group), f"all_reduce of {MB} x float32 by sum"),
    ),
    (
        (lambda group: dist.all_reduce(torch.ones(MB).int(), group=group), f"all_reduce of {MB} x int32 by sum"),
        (lambda group: dist.all_reduce(torch.ones(MB), group=group), f"all_reduce of {MB} x float32 by sum"),
    ),
    (
        (lambda group: dist.all_reduce(torch.ones(3), MAX, group), "all_reduce of 3 x float32 by max"),
        (lambda group: dist.all_reduce(torch.ones(3), group=group), "all_reduce of 3 x float32 by sum"),
    ),
    (
        (lambda group: dist.broadcast(torch.ones(3), 1, group), "broadcast of 3 x float32 with root 1"),
        (lambda group: dist.broadcast(torch.ones(3), 3, group), "broadcast of 3 x float32 with root 3"),
    ),
    (
        (lambda group: dist.reduce(torch.ones(3), 3, group=group), "reduce of 3 x float32 by sum with root 3"),
        (lambda group: dist.all_reduce(torch.ones(3), group=group), "all_reduce of 3 x float32 by sum"),
    ),
    (
        (lambda group: dist.gather(torch.ones(3), parts(3), 1, group), "gather of 3 x float32 with root 1"),
        (lambda group: dist.scatter(torch.ones(3), parts(3), 3, group), "scatter of 3 x float32 with root 3"),
    ),
    (
        (lambda group: dist.all_gather(parts(3), torch.ones(3), group), "all_gather of 3 x float32"),
        (lambda it: dist.reduce_scatter(torch.ones(3), parts(3), MAX, it), "reduce_scatter of 3 x float32 by max"),
    ),
    (
        (lambda group: dist.all_to_all_single(torch.ones(4), torch.ones(4), group=group), "all_to_all of 2 x float32"),
        (lambda group: dist.all_to_all(parts(2), parts(2), group), "all_to_all of uneven parts of float32"),
    ),
    (
        (lambda group: dist.all_reduce(torch.ones(3), PRODUCT, group), "all_reduce of 3 x float32 by product"),
        (lambda group: dist.all_reduce(torch.ones(3), group=group), "all_reduce of 3 x float32 by sum"),
    ),
    (
        (lambda group: dist.all_reduce(torch.ones(3).int(), PRODUCT, group), "all_reduce of 3 x int32 by product"),
        (lambda group: dist.all_reduce(torch.ones(3).int(), BAND, group), "all_reduce of 3 x int32 by band"),
    ),
    (
        (lambda group: dist.all_reduce(torch.ones(3), PRODUCT, group), "all_reduce of 3 x float32 by product"),
        (lambda group: dist.reduce(torch.ones(3), 1, PRODUCT, group), "reduce of 3 x float32 by product with root 1"),
    ),
    (
        (lambda group: dist.all_gather_object([None] * 2, "x", group), "all_gather of 1 x int64"),
        (lambda group: dist.broadcast_object_list(["x"], 1, group), "broadcast of 1 x int64 with root 1"),
    ),
)  # fmt: skip


def call_different_things() -> None:
    """On ranks 1 and 3, each pair in a group of its own, while the others go on."""
    rank = dist.get_rank()
    groups, evens = [group_of(1, 3) for _ in MISMATCHES], group_of(0, 2)
    if rank % 2:
        for group, calls in zip(groups, MISMATCHES, strict=True):
            call = calls[rank // 2][0]
            found = ", but ".join(f"rank {each} called {what}" for each, (_, what) in zip((1, 3), calls, strict=True))
            assert failure(lambda call=call, group=group: call(group)) == MISMATCH.format(found=found)
            assert failure(lambda group=group: dist.barrier(group)) == MISMATCH.format(found=found)
    else:
        assert total(3, evens) == 2.0
    assert total(3, dist.group.WORLD) == 4.0
    text = failure(lambda: dist.all_reduce(torch.ones(2 if rank == 1 else 3)))
    found = (
        "ranks 0, 2 and 3 called all_reduce of 3 x float32 by sum, but rank 1 called all_reduce of 2 x float32 by sum"
    )
    assert text == MISMATCH.format(found=found)


def test_a_call_that_differs_is_told_on_all_ranks_with_what_each_one_called() -> None:
    run_processes(call_different_things, 4)


def send_what_is_not_expected() -> None:
    rank = dist.get_rank()
    uneven, short, other, long = group_of(1, 2, 3), group_of(1, 3), group_of(1, 3), group_of(1, 3)
    if rank:
        check_uneven_parts(uneven, rank)
    if rank % 2:
        advice = "Send and receive tensors of one shape and dtype."
        sizes = {
            "origin": 1,
            "found": "sent 12 bytes of float32 with tag 5 to rank 3, which expects 16 bytes of float32",
        }
        dtypes = {
            "origin": 3,
            "found": "sent 12 bytes of int32 with tag 0 to rank 1, which expects 12 bytes of float32",
        }
        large = {
            "origin": 1,
            "found": f"sent {4 * MB} bytes of float32 with tag 0 to rank 3, which expects {2 * MB} bytes of bfloat16",
        }
        is_first = rank == 1
        for group, send, receive, tag, found in (
            (short, is_first and torch.ones(3), torch.ones(4), 5, sizes),
            (other, not is_first and torch.ones(3).int(), torch.ones(3), 0, dtypes),
            (long, is_first and torch.ones(MB), torch.ones(MB).bfloat16(), 0, large),
        ):
            check_message(group, send, receive, tag, EXPECTED.format(advice=advice, **found))
    assert total(3, dist.group.WORLD) == 4.0


def check_uneven_parts(group: Any, rank: int) -> None:
    """Rank 2 sends rank 3 a row less than that expects; rank 1, which has nothing to do with it, is told, too."""
    to = {1: [1, 1, 1], 2: [1, 1, 1], 3: [1, 1, 1]}[rank]
    of = [1, 2, 1] if rank == 3 else [1, 1, 1]
    found = "sends 28 bytes to rank 3, which expects 56"
    expected = EXPECTED.format(origin=2, found=found, advice="Exchange the sizes first.")
    exchange = lambda: dist.all_to_all_single(torch.ones(sum(of), 7), torch.ones(3, 7), of, to, group)  # noqa: E731
    assert failure(exchange) == expected
    assert failure(lambda: dist.barrier(group)) == expected


def check_message(group: Any, send: Any, receive: torch.Tensor, tag: int, expected: str) -> None:
    peer = 4 - dist.get_rank()
    if send is False:
        assert failure(lambda: dist.recv(receive, peer, group=group, tag=tag)) == expected
        late: Any = dist.irecv(receive, peer, group=group)
        assert text_of_future(late.get_future()) == expected
    elif send.numel() >= MB:
        work: Any = dist.isend(send, peer, group=group, tag=tag)
        assert failure(work.wait) == expected
    else:
        dist.send(send, peer, group=group, tag=tag)  # it is put down
    assert failure(lambda: dist.barrier(group)) == expected


def test_messages_and_parts_that_do_not_fit_are_told_on_all_ranks() -> None:
    run_processes(send_what_is_not_expected, 4)


# --------------------------------------------------------------------------------------------------- alone


def ask_for_what_cannot_be() -> None:
    """What all ranks can see for themselves is refused before anything is sent, and breaks nothing."""
    ones, row, world = torch.ones(3), torch.ones(7), group_of()
    refused = (
        (ShapeError, lambda: dist.all_to_all_single(torch.ones(3), ones)),
        (ShapeError, lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [2, 2])),
        (ShapeError, lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [5, -1], [2, 2])),
        (ShapeError, lambda: dist.all_gather([torch.ones(3), torch.ones(4)], ones)),
        (ShapeError, lambda: dist.reduce_scatter(torch.ones(3), [ones])),
        (UnsupportedError, lambda: world.send([ones], dist.get_rank(), 0)),
        (UnsupportedError, lambda: world.recv([ones], 2, 0)),
        (UnsupportedError, lambda: dist.irecv(torch.ones(3, 7).t(), 1 - dist.get_rank())),
        (UnsupportedError, lambda: dist.broadcast(torch.ones(3, device="meta"), 0)),
        (UnsupportedError, lambda: dist.broadcast(row.to_sparse(), 0)),
    )  # fmt: skip
    for kind, call in refused:
        assert failure(call, kind).count(". ") >= 2
    assert total(3, dist.group.WORLD) == 2.0


def test_what_a_rank_can_see_for_itself_breaks_nothing() -> None:
    run_processes(ask_for_what_cannot_be, 2)
