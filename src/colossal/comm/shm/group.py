"""The process group that torch.distributed sees."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, final

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from colossal.comm.shm.engine import CODES, DTYPES, REDUCTIONS, Engine, Kind
from colossal.comm.shm.work import Delivery, Finished, Pending, Worker
from colossal.errors import ShapeError, UnsupportedError

_Tensor = torch.Tensor
_Tensors = Sequence[torch.Tensor]
_NUMBERS = frozenset(DTYPES)
_REDUCTIONS = {getattr(dist.ReduceOp, name.upper()): number for number, name in enumerate(REDUCTIONS)}
_STOP_SECONDS = 1.0
_ANYBODY = -1


@final
class SharedMemoryGroup(dist.ProcessGroup):
    """Ranks of one host that communicate through memory which all of them see.

    It takes dense CPU tensors: all moves of any dtype, and sums, means, maxima and minima of floating and whole numbers.
    What is left (products, bitwise and complex reductions, sparse tensors, means of whole numbers) goes to a group of
    gloo, made when it is first needed. Ranks compare what they are about to do before they do it.

    Every rank gets the same bits: a number is reduced in the order of the ranks, and half precision in single. Against
    gloo, which adds in another order, sums differ by the rounding of one order of additions.

    Args:
        store: Where the ranks of this group find each other.
        engine: This rank's end of the shared memory.
        timeout: How long a wait may take.
    """

    def __init__(self, store: dist.Store, engine: Engine, timeout: timedelta) -> None:
        super().__init__(engine.rank, engine.size)  # type: ignore[call-arg, arg-type]
        self._store, self._engine, self._timeout = store, engine, timeout
        self._rank, self._num_ranks = engine.rank, engine.size
        self._seconds = timeout.total_seconds()
        self._collectives, self._messages = Worker("shm_collectives"), Worker("shm_messages")
        self._finalizer = weakref.finalize(self, _dissolve, engine, self._collectives, self._messages)

    # --- what torch asks about a group ---

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the backend's name."""
        return "shm"

    @property
    def _device_types(self) -> list[torch.device]:  # type: ignore[override]
        return [torch.device("cpu")]

    @property
    def group_name(self) -> Any:  # type: ignore[override]
        """The name under which torch keeps this group."""
        return c10d._world.pg_names[self]

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let waits take so long."""
        self._timeout, self._seconds = timeout, timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank are told."""
        self._finalizer()
        gloo = self.__dict__.pop("_gloo", None)
        if gloo is not None:
            with suppress(AttributeError):  # of torch 2.11
                gloo.shutdown()

    abort = shutdown

    # --- reductions ---

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce a tensor to all ranks, in place."""
        tensors, opts = _as_list(tensors), _options(opts, dist.AllreduceOptions)
        (tensor,) = tensors
        reduction = self._reduction(opts, tensor)
        if reduction is None:
            return self._elsewhere("allreduce", tensor, opts, tensors, opts)

        def task() -> None:
            with _Writing(tensor) as dense:
                self._run(Kind.ALL_REDUCE, dense, dense.numel(), (), (dense.data_ptr(),), opts, reduction)

        return self._carry_out(task, opts, tensors)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce several tensors to all ranks, in place."""
        opts = _options(opts, c10d.AllreduceCoalescedOptions)
        return self._all_of([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce a tensor to one rank, in place there."""
        opts = _options(opts, c10d.ReduceOptions)
        (tensor,) = tensors
        reduction, root = self._reduction(opts, tensor), opts.rootRank
        if reduction is None:
            return self._elsewhere("reduce", tensor, opts, tensors, opts)

        def task() -> None:
            with _Writing(tensor) as dense:
                everywhere = (dense.data_ptr(),) * self._num_ranks
                self._run(Kind.REDUCE, dense, dense.numel(), everywhere, everywhere, opts, reduction, root)

        return self._carry_out(task, opts, tensors)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Reduce a list of tensors, one for each rank, to that rank."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        (output,), (parts,) = outputs, inputs
        self._check_parts("reduce_scatter", parts, output)
        reduction = self._reduction(opts, output)
        if reduction is None:
            return self._elsewhere("reduce_scatter", output, opts, outputs, inputs, opts)

        def task() -> None:
            dense = [part.contiguous() for part in parts]
            with _Writing(output, clear_of=dense) as result:
                addresses = _addresses(dense)
                out = (result.data_ptr(),) * self._num_ranks
                self._run(Kind.REDUCE_SCATTER, result, result.numel(), addresses, out, opts, reduction)

        return self._carry_out(task, opts, outputs)

    def reduce_scatter_single(self, output: _Tensor, tensor: _Tensor, opts: Any = None) -> Any:
        """Reduce equal parts of a tensor, one for each rank, to that rank."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        self._check_whole("reduce_scatter", tensor, output)
        reduction = self._reduction(opts, output)
        if reduction is None:
            return self._elsewhere("_reduce_scatter_base", output, opts, output, tensor, opts)

        def task() -> None:
            dense = tensor.contiguous()
            with _Writing(output, clear_of=[dense]) as result:
                addresses = self._parts(dense, result)
                out = (result.data_ptr(),) * self._num_ranks
                self._run(Kind.REDUCE_SCATTER, result, result.numel(), addresses, out, opts, reduction)

        return self._carry_out(task, opts, [output])

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Reduce equal parts of several tensors."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        pairs = zip(outputs, inputs, strict=True)
        return self._all_of([self.reduce_scatter_single(to, tensor, opts) for to, tensor in pairs], outputs)

    # --- moves ---

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Collect every rank's tensor in a list."""
        opts = _options(opts, c10d.AllgatherOptions)
        (parts,), (tensor,) = outputs, inputs
        self._check_parts("all_gather", parts, tensor)

        def task() -> None:
            own = tensor.contiguous()
            with _WritingAll(parts) as dense:
                self._run(Kind.ALL_GATHER, own, own.numel(), (own.data_ptr(),), _addresses(dense), opts)

        return self._carry_out(task, opts, outputs)

    def all_gather_single(self, output: _Tensor, tensor: _Tensor, opts: Any = None) -> Any:
        """Join every rank's tensor to one."""
        opts = _options(opts, c10d.AllgatherOptions)
        self._check_whole("all_gather", output, tensor)

        def task() -> None:
            own = tensor.contiguous()
            with _Writing(output) as whole:
                self._run(Kind.ALL_GATHER, own, own.numel(), (own.data_ptr(),), self._parts(whole, own), opts)

        return self._carry_out(task, opts, [output])

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Join every rank's tensors, each to one."""
        opts = _options(opts, c10d.AllgatherOptions)
        pairs = zip(outputs, inputs, strict=True)
        return self._all_of([self.all_gather_single(to, tensor, opts) for to, tensor in pairs], outputs)

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Collect every rank's tensors in a list for each rank."""
        opts = _options(opts, c10d.AllgatherOptions)
        works = [self.allgather([[row[i] for row in outputs]], [tensor], opts) for i, tensor in enumerate(inputs)]
        return self._all_of(works, outputs)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Copy the root's tensor to all ranks."""
        opts = _options(opts, c10d.BroadcastOptions)
        tensors = _as_list(tensors)
        tensor, root = tensors[opts.rootTensor], opts.rootRank

        def task() -> None:
            with _Writing(tensor) as dense:
                out = (dense.data_ptr(),) * self._num_ranks
                self._run(Kind.BROADCAST, dense, dense.numel(), out[:1], out, opts, root=root)

        return self._carry_out(task, opts, tensors)

    def all_to_all_single(
        self,
        output: _Tensor,
        tensor: _Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Send parts of a tensor to all ranks, and join what comes from them."""
        opts = _options(opts, c10d.AllToAllOptions)
        to, of = self._splits(output, output_splits), self._splits(tensor, input_splits)
        is_even = not output_splits and not input_splits

        def task() -> None:
            dense = tensor.contiguous()
            with _Writing(output, clear_of=[dense]) as result:
                count = of[0] if is_even else 0
                sent, expected = _advance(dense, of), _advance(result, to)
                splits = None if is_even else [length * dense.itemsize for length in (*of, *to)]
                self._run(Kind.ALL_TO_ALL, dense, count, sent, expected, opts, splits=splits)

        return self._carry_out(task, opts, [output])

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Send a list of tensors, one to each rank, and collect what comes from them."""
        opts = _options(opts, c10d.AllToAllOptions)
        self._check_length("all_to_all", outputs)
        self._check_length("all_to_all", inputs)

        def task() -> None:
            dense = [tensor.contiguous() for tensor in inputs]
            with _WritingAll(outputs) as results:
                splits = [tensor.numel() * tensor.itemsize for tensor in (*dense, *results)]
                self._run(Kind.ALL_TO_ALL, dense[0], 0, _addresses(dense), _addresses(results), opts, splits=splits)

        return self._carry_out(task, opts, outputs)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Collect every rank's tensor in a list of the root."""
        opts = _options(opts, c10d.GatherOptions)
        (tensor,), root = inputs, opts.rootRank
        parts: _Tensors = outputs[0] if self._rank == root else ()
        if self._rank == root:
            self._check_parts("gather", parts, tensor)

        def task() -> None:
            own = tensor.contiguous()
            with _WritingAll(parts) as dense:
                sent = (own.data_ptr(),) * self._num_ranks
                self._run(Kind.GATHER, own, own.numel(), sent, _addresses(dense), opts, root=root)

        return self._carry_out(task, opts, outputs)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Send a list of the root's tensors, one to each rank."""
        opts = _options(opts, c10d.ScatterOptions)
        (output,), root = outputs, opts.rootRank
        parts: _Tensors = inputs[0] if self._rank == root else ()
        if self._rank == root:
            self._check_parts("scatter", parts, output)

        def task() -> None:
            dense = [part.contiguous() for part in parts]
            with _Writing(output) as result:
                out = (result.data_ptr(),) * self._num_ranks
                self._run(Kind.SCATTER, result, result.numel(), _addresses(dense), out, opts, root=root)

        return self._carry_out(task, opts, outputs)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        opts = _options(opts, c10d.BarrierOptions)
        return self._carry_out(lambda: self._run(Kind.BARRIER, _NOTHING, 0, (), (), opts), opts, [])

    # --- messages ---

    def send(self, tensors: _Tensors, to: int, tag: int) -> Any:
        """Send a tensor to one rank."""
        (tensor,) = tensors
        self._check_peer(to)
        dense = self._checked(tensor).contiguous()
        return self._deliver(self._engine.send(to, tag, dense), dense)

    def recv(self, tensors: _Tensors, origin: int, tag: int) -> Any:
        """Receive a tensor from one rank."""
        (tensor,) = tensors
        self._check_peer(origin)
        return self._receive(tensor, origin, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> Any:
        """Receive a tensor from whichever rank sends one first."""
        (tensor,) = tensors
        return self._receive(tensor, _ANYBODY, tag)

    def _receive(self, tensor: _Tensor, origin: int, tag: int) -> Delivery:
        if not self._checked(tensor).is_contiguous():
            raise UnsupportedError(
                "A tensor to receive must be contiguous. Found one with strides "
                f"{tuple(tensor.stride())}. Receive a contiguous one and copy it."
            )
        return self._deliver(self._engine.receive(origin, tag, tensor), tensor, is_received=True)

    def _deliver(self, message: int, tensor: _Tensor, *, is_received: bool = False) -> Delivery:
        work = Delivery(self._engine, message, tensor, self._seconds, self._messages.submit)
        needs_care = self._engine.is_crowded() if is_received else not work.is_completed()
        if needs_care:
            work.watch()
        return work

    # --- how they are carried out ---

    def _carry_out(self, task: Callable[[], None], opts: Any, result: Any) -> Any:
        """Run a task at once if the caller waits and nothing is before it, else in the thread for collectives."""
        if not opts.asyncOp and self._collectives.is_idle:
            task()
            return Finished(result)
        work = Pending(task, result)
        self._collectives.submit(work)
        return work

    def _all_of(self, works: Sequence[Any], result: Any) -> Any:
        """Make one of several works, of which the last is over last."""
        if not works:
            return Finished(result)

        def wait() -> None:
            for work in works:
                work.wait()

        if all(isinstance(work, Finished) for work in works):
            return Finished(result)
        whole = Pending(wait, result)
        self._collectives.submit(whole)
        return whole

    def _run(
        self,
        kind: Kind,
        tensor: _Tensor,
        count: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        opts: Any,
        reduction: int = 0,
        root: int = -1,
        splits: Sequence[int] | None = None,
    ) -> None:
        seconds = opts.timeout.total_seconds()
        seconds = seconds if seconds > 0 else self._seconds
        self._engine.run(kind, self._checked(tensor).dtype, count, inputs, outputs, seconds, reduction, root, splits)

    def _elsewhere(self, name: str, tensor: _Tensor, opts: Any, *arguments: Any) -> Any:
        """Leave a collective to gloo, once all ranks have said that they will."""

        def task() -> None:
            self._run(Kind.ELSEWHERE, tensor, tensor.numel(), (), (), opts)
            getattr(self._gloo, name)(*arguments).wait()

        return self._carry_out(task, opts, [tensor])

    @cached_property
    def _gloo(self) -> Any:
        return c10d.ProcessGroupGloo(
            dist.PrefixStore("gloo/", self._store), self._rank, self._num_ranks, timeout=self._timeout
        )

    # --- checks ---

    def _reduction(self, opts: Any, tensor: _Tensor) -> int | None:
        """Return the library's number for a reduction; None for what it leaves to gloo."""
        number = _REDUCTIONS.get(opts.reduceOp.op)
        is_mean_of_whole_numbers = number == 1 and not tensor.is_floating_point()
        is_ours = tensor.dtype in _NUMBERS and tensor.layout is torch.strided and not is_mean_of_whole_numbers
        return number if is_ours else None

    @staticmethod
    def _checked(tensor: _Tensor) -> _Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"The backend 'shm' moves dense tensors in host memory. Found a tensor of {tensor.layout} on "
                f"{tensor.device}. Make a group with another backend for it: nccl for GPUs, gloo for sparse tensors."
            )
        return tensor

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self._num_ranks or peer == self._rank:
            raise UnsupportedError(
                f"A message goes to another rank of its group, from 0 to {self._num_ranks - 1}. Found {peer} on rank "
                f"{self._rank}. Name another rank; a rank's own data needs no message."
            )

    def _parts(self, whole: _Tensor, part: _Tensor) -> list[int]:
        begin, length = whole.data_ptr(), part.numel() * part.itemsize
        return [begin + rank * length for rank in range(self._num_ranks)]

    def _splits(self, tensor: _Tensor, lengths: Sequence[int] | None) -> list[int]:
        """Return how many elements belong to each rank."""
        rows, row = (tensor.shape[0], tensor[0].numel() if tensor.shape[0] else 0) if tensor.dim() else (1, 1)
        if not lengths:
            if rows % self._num_ranks:
                raise ShapeError(
                    f"all_to_all without lengths needs a first dimension that divides by {self._num_ranks}. "
                    f"Found {tuple(tensor.shape)}. Pass the lengths of the parts."
                )
            return [rows // self._num_ranks * row] * self._num_ranks
        if len(lengths) != self._num_ranks or sum(lengths) != rows or min(lengths) < 0:
            raise ShapeError(
                f"all_to_all needs {self._num_ranks} lengths that add up to the first dimension. Found "
                f"{list(lengths)} for {tuple(tensor.shape)}. Pass one for each rank."
            )
        return [length * row for length in lengths]

    def _check_length(self, name: str, tensors: _Tensors) -> None:
        if len(tensors) != self._num_ranks:
            raise ShapeError(
                f"{name} needs a tensor for each of {self._num_ranks} ranks. Found {len(tensors)}. Pass one for each."
            )

    def _check_parts(self, name: str, parts: _Tensors, whole: _Tensor) -> None:
        self._check_length(name, parts)
        for part in parts:
            if part.numel() != whole.numel() or part.dtype != whole.dtype:
                raise ShapeError(
                    f"{name} needs tensors of one size and dtype. Found {tuple(part.shape)} of {part.dtype} beside "
                    f"{tuple(whole.shape)} of {whole.dtype}. Pad them, or use all_to_all for parts of several sizes."
                )

    def _check_whole(self, name: str, whole: _Tensor, part: _Tensor) -> None:
        if whole.numel() != part.numel() * self._num_ranks or whole.dtype != part.dtype:
            raise ShapeError(
                f"{name} needs a tensor of {self._num_ranks} times the elements of the other, and of its dtype. Found "
                f"{tuple(whole.shape)} of {whole.dtype} and {tuple(part.shape)} of {part.dtype}. Make them so."
            )

    # Names of torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


_NOTHING = torch.empty(0, dtype=torch.uint8)
assert torch.uint8 in CODES


def _dissolve(engine: Engine, *workers: Worker) -> None:
    engine.leave()
    for worker in workers:
        worker.stop(_STOP_SECONDS)


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _options(given: Any, make: Callable[[], Any]) -> Any:
    """Return the options; those of a caller that gave none, or gave the operation alone, wait as gloo's do."""
    if given is None:
        return make()
    if isinstance(given, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        options = make()
        options.reduceOp = given
        return options
    return given


def _addresses(tensors: _Tensors) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _advance(tensor: _Tensor, lengths: Sequence[int]) -> list[int]:
    """Return the address of each part."""
    addresses, at = [], tensor.data_ptr()
    for length in lengths:
        addresses.append(at)
        at += length * tensor.itemsize
    return addresses


@final
class _Writing:
    """Lets the engine write to a tensor: to itself, or to a dense copy that is copied back.

    ``clear_of`` are tensors that it must not overlap with.
    """

    def __init__(self, tensor: _Tensor, clear_of: _Tensors = ()) -> None:
        self._tensor = tensor
        is_free = tensor.is_contiguous() and not any(_overlap(tensor, other) for other in clear_of)
        self._dense = tensor if is_free else tensor.contiguous().clone()

    def __enter__(self) -> _Tensor:
        return self._dense

    def __exit__(self, *error: object) -> None:
        if self._dense is not self._tensor and error[0] is None:
            with torch.no_grad():
                self._tensor.detach().copy_(self._dense)


@final
class _WritingAll:
    """The same for several tensors."""

    def __init__(self, tensors: _Tensors) -> None:
        self._all = [_Writing(tensor) for tensor in tensors]

    def __enter__(self) -> list[_Tensor]:
        return [one.__enter__() for one in self._all]

    def __exit__(self, *error: object) -> None:
        for one in self._all:
            one.__exit__(*error)


def _overlap(one: _Tensor, other: _Tensor) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + one.numel() * one.itemsize
    return begin < other.data_ptr() + other.numel() * other.itemsize and other.data_ptr() < end
