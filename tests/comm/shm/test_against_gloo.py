"""Random programs, on shared memory and on gloo: what comes out is the same.

All ranks draw one program from one seed; what a rank puts in is drawn from the seed, the number of the collective and
the rank, so that every rank knows what all others put in.

Moves, reductions of whole numbers, maxima and minima equal gloo's; products do but for the rounding of n factors. Sums
and means of floating numbers are compared twice: bit by bit with the sum of the first and the second half of the ranks,
half precision in single, which also makes all ranks equal; and with gloo's, which adds in another order. Each of two
orders of n summands is off by at most (n - 1) * eps / 2 * sum |x|, plus what a last rounding, and one of a mean, adds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal.testing import run_processes

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *HALVES)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *FLOATS, *WHOLE, torch.bool, torch.complex64)
UNKNOWN_TO_GLOO = {torch.int16: torch.int32}
SIZES = (0, 1, 1, 7, 64, 1001, 5000, 17_001)
"""Elements of a part; 17,001 need more than the 32 KB up to which every rank reduces everything."""
LARGE = (150_001, 300_007)
"""More than a slot of 1 MB, and for messages more than a ring."""
LAYOUTS = ("dense", "dense", "transposed", "strided")


def numbers(seed: int) -> Random:
    return Random(seed)  # noqa: S311 (they decide what is tested)


@dataclass(frozen=True)
class Case:
    """One collective of a program."""

    seed: int
    number: int
    name: str
    group: int
    dtype: torch.dtype
    size: int
    op: str
    root: int
    is_async: bool
    layout: str

    def draw(self, rank: int, part: int = 0, size: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, self.number, rank, part)) % 2**62)
        size = self.size if size is None else size
        if self.dtype.is_floating_point or self.dtype.is_complex:
            full = torch.complex64 if self.dtype.is_complex else torch.float32
            return torch.randn(size, generator=generator, dtype=full).to(self.dtype)
        return torch.randint(0, 2 if self.dtype is torch.bool else 100, (size,), generator=generator).to(self.dtype)

    def flat(self, layout: str = "strided") -> "Case":
        return replace(self, layout=layout) if self.layout == "transposed" or layout == "dense" else self

    def is_rounded(self) -> bool:
        return (
            self.name in REDUCTIONS
            and self.op in ("SUM", "AVG")
            and (self.dtype.is_floating_point or self.dtype.is_complex)
        )


class Side:
    """Shared memory or gloo, as one rank of one group uses it."""

    def __init__(self, group: dist.ProcessGroup, *, is_ours: bool) -> None:
        self.group, self.is_ours, self.rank, self.size = group, is_ours, group.rank(), group.size()

    def lay(self, case: Case, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of these values in the case's layout; for gloo a dense one of a dtype that it knows."""
        if not self.is_ours:
            values = real(values)
            return values.to(UNKNOWN_TO_GLOO.get(values.dtype, values.dtype), copy=True)
        if case.layout == "transposed" and values.numel() % 7 == 0:
            return values.view(-1, 7).t().contiguous().t()
        if case.layout == "strided":
            return torch.stack([values, values], 1)[:, 1]
        return values.clone().view(()) if values.numel() == 1 and case.name in ("all_reduce", "broadcast") else values

    def own(self, case: Case, part: int = 0) -> torch.Tensor:
        return self.lay(case, case.draw(self.rank, part))

    def parts(self, case: Case) -> list[torch.Tensor]:
        return [self.own(case, part) for part in range(self.size)]

    def room(self, case: Case, parts: int = 1) -> torch.Tensor:
        return self.lay(case, torch.zeros(case.size * parts, dtype=case.dtype))

    def options(self, case: Case) -> dict[str, Any]:
        return {"group": self.group, "async_op": case.is_async and self.is_ours}

    def reduction(self, case: Case) -> dict[str, Any]:
        return {"op": getattr(dist.ReduceOp, case.op), **self.options(case)}

    def root(self, case: Case) -> int:
        return dist.get_global_rank(self.group, case.root)


Outcome = tuple[Any, list[torch.Tensor]]


def all_reduce(case: Case, side: Side) -> Outcome:
    tensor = side.own(case)
    return dist.all_reduce(tensor, **side.reduction(case)), [tensor]


def reduce(case: Case, side: Side) -> Outcome:
    tensor = side.own(case)
    work = dist.reduce(tensor, side.root(case), **side.reduction(case))
    return work, [tensor] if side.rank == case.root else []


def reduce_scatter(case: Case, side: Side) -> Outcome:
    result = side.room(case)
    return dist.reduce_scatter(result, side.parts(case), **side.reduction(case)), [result]


def reduce_scatter_whole(case: Case, side: Side) -> Outcome:
    """Odd ones in place: the result is a part of what goes in."""
    whole = side.lay(case.flat("dense"), torch.cat([case.draw(side.rank, part) for part in range(side.size)]))
    is_in_place = side.is_ours and case.number % 2 and case.size
    result = whole.chunk(side.size)[side.rank] if is_in_place else side.room(case.flat())
    return reduce_scatter_single(result, whole, **side.reduction(case)), [result]


def broadcast(case: Case, side: Side) -> Outcome:
    tensor = side.own(case)
    return dist.broadcast(tensor, side.root(case), **side.options(case)), [tensor]


def all_gather(case: Case, side: Side) -> Outcome:
    parts = [side.room(case) for _ in range(side.size)]
    return dist.all_gather(parts, side.own(case), **side.options(case)), parts


def all_gather_whole(case: Case, side: Side) -> Outcome:
    """Odd ones in place: what goes in is a part of the result."""
    is_in_place = side.is_ours and case.number % 2 and case.size
    case = case.flat("dense") if is_in_place else case
    whole, own = side.room(case, side.size), side.own(case)
    if is_in_place:
        own = whole.chunk(side.size)[side.rank].copy_(own)
    return all_gather_single(whole, own, **side.options(case)), [whole]


def all_to_all(case: Case, side: Side) -> Outcome:
    parts = [side.room(case) for _ in range(side.size)]
    return dist.all_to_all(parts, side.parts(case), **side.options(case)), parts


def all_to_all_even(case: Case, side: Side) -> Outcome:
    whole = side.room(case, side.size)
    own = side.lay(case, torch.cat([case.draw(side.rank, part) for part in range(side.size)]))
    return dist.all_to_all_single(whole, own, **side.options(case)), [whole]


def all_to_all_uneven(case: Case, side: Side) -> Outcome:
    """How much goes from one rank to another comes from the program, too."""
    case = case.flat()
    table, (rank, size) = numbers(case.number), (side.rank, side.size)
    rows = [[table.choice((0, 1, case.size, case.size // 3)) for _ in range(size)] for _ in range(size)]
    to, of = rows[rank], [row[rank] for row in rows]
    whole = side.lay(case, torch.zeros(sum(of), dtype=case.dtype))
    own = side.lay(case, torch.cat([case.draw(rank, part, length) for part, length in enumerate(to)]))
    return dist.all_to_all_single(whole, own, of, to, **side.options(case)), [whole]


def gather(case: Case, side: Side) -> Outcome:
    parts = [side.room(case) for _ in range(side.size)] if side.rank == case.root else None
    return dist.gather(side.own(case), parts, side.root(case), **side.options(case)), parts or []


def scatter(case: Case, side: Side) -> Outcome:
    result, parts = side.room(case), side.parts(case) if side.rank == case.root else None
    return dist.scatter(result, parts, side.root(case), **side.options(case)), [result]


def barrier(case: Case, side: Side) -> Outcome:
    return dist.barrier(**side.options(case)), []


REDUCTIONS = {each.__name__: each for each in (all_reduce, reduce, reduce_scatter, reduce_scatter_whole)}
ALL_TO_ALL = (all_to_all, all_to_all_even, all_to_all_uneven)
MOVES = {
    each.__name__: each for each in (broadcast, all_gather, all_gather_whole, *ALL_TO_ALL, gather, scatter, barrier)
}


def play_collective(case: Case, ours: dist.ProcessGroup, gloo: dist.ProcessGroup) -> "Waiting":
    function = (REDUCTIONS | MOVES)[case.name]
    work, found = function(case, Side(ours, is_ours=True))
    _, expected = function(replace(case, op=case.op.replace("AVG", "SUM")), Side(gloo, is_ours=False))

    def check() -> None:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is case.dtype
            dense = real(one).reshape(other.shape)
            if case.is_rounded():
                check_sum(case, dense, other, ours)
            else:
                is_product = case.op == "PRODUCT" and case.name in REDUCTIONS and case.dtype.is_floating_point
                rtol = ours.size() * torch.finfo(case.dtype).eps if is_product else 0.0
                torch.testing.assert_close(dense, other.to(dense.dtype), rtol=rtol, atol=rtol * 1e-3)

    return Waiting(case, [work] if case.is_async else [], check)


def check_sum(case: Case, found: torch.Tensor, other: torch.Tensor, group: dist.ProcessGroup) -> None:
    size, part = group.size(), group.rank() if case.name.startswith("reduce_scatter") else 0
    wide = torch.float32 if case.dtype in HALVES else found.dtype
    summands = [real(case.draw(rank, part)).to(wide) for rank in range(size)]
    expected = add_halves(summands)
    expected = (expected / size if case.op == "AVG" else expected).to(found.dtype)
    if not case.dtype.is_complex:  # torch lets backends see the parts of complex numbers in all_reduce only
        assert torch.equal(bits(found), bits(expected.view(found.shape))), (found, expected)
    by, eps = size if case.op == "AVG" else 1, torch.finfo(found.dtype).eps
    bound = (size - 1) * eps * sum(each.abs() for each in summands) / by + 2 * eps * expected.abs()
    assert ((found - other / by).abs() <= bound).all(), (found, other / by)


def add_halves(summands: list[torch.Tensor]) -> torch.Tensor:
    middle = (len(summands) + 1) // 2
    return add_halves(summands[:middle]) + add_halves(summands[middle:]) if middle < len(summands) else summands[0]


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def play_objects(case: Case, group: dist.ProcessGroup, _: object) -> "Waiting":
    size, rank, root = group.size(), group.rank(), dist.get_global_rank(group, case.root)
    own = [{"rank": each, "of": case.number, "text": "x" * (case.size // 100)} for each in range(size)]
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, own[rank], group=group)
    assert everybody == own
    first = [own[rank], case.number]
    dist.broadcast_object_list(first, root, group=group)
    assert first == [own[case.root], case.number]
    collected: list[Any] | None = [None] * size if rank == case.root else None
    dist.gather_object(own[rank], collected, root, group=group)
    assert collected == (own if rank == case.root else None)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, own if rank == case.root else None, root, group=group)
    assert mine == [own[rank]]
    return Waiting(case)


def play_messages(case: Case, group: dist.ProcessGroup, _: object) -> "Waiting":
    """Some messages between random ranks: those of one tag keep their order, all others are begun in any."""
    shared, own, rank = numbers(case.number), numbers(case.number * 64 + group.rank()), group.rank()
    begun: list[tuple[Callable[..., Any], torch.Tensor, int, int]] = []
    awaited: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in range(shared.randrange(1, 9)):
        (source, target), tag = shared.sample(range(group.size()), 2), 8 * case.number + shared.randrange(3)
        values = case.draw(source, part)
        if rank == source:
            begun.append((dist.isend, values, dist.get_global_rank(group, target), tag))
        elif rank == target:
            awaited.append((torch.zeros_like(values), values))
            begun.append((dist.irecv, awaited[-1][0], dist.get_global_rank(group, source), tag))
    begun = shuffle_but_for_streams(begun, own)
    if case.is_async or not begun:
        works = [function(tensor, peer, group=group, tag=tag) for function, tensor, peer, tag in begun]
    else:
        works = dist.batch_isend_irecv([dist.P2POp(f, tensor, peer, group, tag) for f, tensor, peer, tag in begun])

    def check() -> None:
        assert all(torch.equal(bits(one), bits(other)) for one, other in awaited)

    return Waiting(case, list(works), check)


def shuffle_but_for_streams(begun: list[Any], rng: Random) -> list[Any]:
    order, rest = [(each[0], *each[2:]) for each in begun], list(begun)
    rng.shuffle(order)
    return [rest.pop(next(i for i, each in enumerate(rest) if (each[0], *each[2:]) == key)) for key in order]


def play_blocking_messages(case: Case, group: dist.ProcessGroup, _: object) -> "Waiting":
    """Each rank hands the root a tensor, and it takes them from whoever comes; then one goes around."""
    size, rank, tag = group.size(), group.rank(), 8 * case.number
    ranks = dist.get_process_group_ranks(group)
    if rank == case.root:
        room, came = torch.empty_like(case.draw(0)), set()
        for _each in range(size - 1):
            source = dist.recv(room, group=group, tag=tag)
            came.add(source)
            assert torch.equal(room, case.draw(ranks.index(source)))
        assert came == {*ranks} - {ranks[rank]}
    else:
        dist.send(Side(group, is_ours=True).own(case), ranks[case.root], group=group, tag=tag)
    token = case.draw(0) if rank == 0 else torch.empty_like(case.draw(0))
    if rank:
        dist.recv(token, ranks[rank - 1], group=group, tag=tag + 1)
    if rank + 1 < size:
        dist.send(token, ranks[rank + 1], group=group, tag=tag + 1)
    assert torch.equal(token, case.draw(0))
    return Waiting(case)


PLAYERS = {"objects": play_objects, "messages": play_messages, "blocking messages": play_blocking_messages}


@dataclass
class Waiting:
    """What has begun, and how to check it once it is over."""

    case: Case
    works: list[Any] = field(default_factory=list)
    check: Callable[[], None] = lambda: None

    def finish(self, rng: Random) -> None:
        rng.shuffle(self.works)
        for work in self.works:
            way = rng.randrange(3)
            if way == 0:
                work.wait()
            elif way == 1:
                work.get_future().wait()
            else:
                assert work.get_future().then(lambda _: "seen").wait() == "seen"
                assert work.is_completed()
        self.check()


def draw_case(seed: int, number: int, rng: Random, sizes: list[int]) -> Case:
    names = [*REDUCTIONS, *MOVES, *REDUCTIONS, *MOVES, "objects", "messages", "messages", "blocking messages"]
    name, group, dtype = rng.choice(names), rng.randrange(len(sizes)), rng.choice(DTYPES)
    ops = ["SUM", "MAX", "MIN", "PRODUCT"] + ["AVG"] * dtype.is_floating_point
    if dtype is torch.bool:
        ops = ["MAX", "MIN"]
    elif dtype.is_complex:
        ops = ["SUM", "AVG"]
        name = "all_reduce" if name.startswith("reduce_scatter") else name
    elif dtype is torch.int16:
        ops.remove("PRODUCT")
    if sizes[group] == 1 and "messages" in name:
        name = "barrier"
    size = rng.choice(LARGE) if rng.random() < 0.06 else rng.choice(SIZES)
    op, root, is_async = rng.choice(ops), rng.randrange(sizes[group]), rng.random() < 0.5
    return Case(seed, number, name, group, dtype, size, op, root, is_async, rng.choice(LAYOUTS))


def play(seed: int, length: int) -> int:
    """Play a program; returns how many of its collectives this rank took part in."""
    shared, own, world = numbers(seed), numbers(seed * 64 + dist.get_rank()), dist.get_world_size()
    members = [sorted(shared.sample(range(world), shared.randrange(1, world + 1))) for _ in range(2)]
    members.insert(0, list(range(world)))
    pairs: list[tuple[Any, Any]] = [(dist.new_group(ranks), dist.new_group(ranks, backend="gloo")) for ranks in members]
    waiting: list[Waiting] = []
    taken_part = 0
    for number in range(length):
        case = draw_case(seed, number, shared, [len(ranks) for ranks in members])
        if dist.get_rank() not in members[case.group]:
            continue
        assert dist.get_backend(pairs[case.group][0]) == "shm"
        taken_part += 1
        try:
            waiting.append(PLAYERS.get(case.name, play_collective)(case, *pairs[case.group]))
        except Exception as error:
            raise AssertionError(f"{case}") from error
        if not waiting[-1].works or own.random() < 0.4:
            finish(waiting, own, 0 if own.random() < 0.3 else len(waiting) - 2)
    finish(waiting, own, 0)
    return taken_part


def finish(waiting: list[Waiting], rng: Random, rest: int) -> None:
    """Wait for some of them, in any order, until so many are left."""
    while len(waiting) > max(rest, 0):
        each = waiting.pop(rng.randrange(len(waiting)))
        try:
            each.finish(rng)
        except Exception as error:
            raise AssertionError(f"{each.case}") from error


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (2, 234), (3, 2), (3, 250), (4, 3), (4, 203)])
def test_random_programs_do_what_they_do_on_gloo(size, seed) -> None:
    taken_part = run_processes(play, size, seed, 80)
    assert min(taken_part) >= 20
