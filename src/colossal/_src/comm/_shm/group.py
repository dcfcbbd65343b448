# pyright: reportPrivateImportUsage=false
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

from colossal._src.comm._shm.engine import Kind, SharedMemoryEngine
from colossal._src.comm._shm.options import as_list, native_reduction, options, reduction_number
from colossal._src.comm._shm.progress_thread import ProgressThread
from colossal._src.comm._shm.tensors import (
    WritableTensor,
    WritableTensors,
    addresses,
    check_full,
    check_length,
    check_peer,
    check_rank_parts,
    checked,
    packed,
    part_addresses,
    split_lengths,
)
from colossal._src.comm._shm.work import CompletedWork, P2PWork, PendingWork, TaskThread, stop
from colossal.errors import UnsupportedError

_Tensor = torch.Tensor
_Tensors = Sequence[torch.Tensor]
_ANYBODY = -1
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_ProcessGroup: Any = dist.ProcessGroup  # whose methods have overloads that no caller uses


@final
class SharedMemoryGroup(_ProcessGroup):
    """Ranks of one host that communicate through memory which all of them see.

    It takes dense CPU tensors: data movement of any dtype, and sums, means, maxima and minima of floating-point and
    integer dtypes. Anything else (products, bitwise and complex reductions, sparse tensors, means of integers) goes to
    a gloo group, made when it is first needed. Ranks compare which collective they call before they run it.

    Every rank gets the same bits: a number is reduced in the order of the ranks, and half precision in single. Against
    gloo, which adds in another order, sums differ by the rounding of one order of additions.
    """

    def __init__(self, store: dist.Store, engine: SharedMemoryEngine, timeout: timedelta, name: str = "") -> None:
        super().__init__(engine.rank, engine.size)  # pyright: ignore[reportUnknownMemberType]
        self._store, self._engine, self._timeout, self._name = store, engine, timeout, name
        self._rank, self._num_ranks = engine.rank, engine.size
        self._seconds = timeout.total_seconds()
        # Two threads: collectives run in one order, and a message that waits for its peer would hold up those after it.
        self._collectives, self._messages = TaskThread("shm_collectives"), TaskThread("shm_messages")
        self._caretaker = ProgressThread("shm_caretaker")
        # `stop` gets the parts and not self, as a reference to the group would keep it from ever being collected.
        self._finalizer = weakref.finalize(self, stop, engine, self._collectives, self._messages, self._caretaker)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the backend's name."""
        return "shm"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def group_name(self) -> Any:
        """The name under which torch keeps this group."""
        return self._name

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let waits take so long."""
        self._timeout, self._seconds = timeout, timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: peers that still wait for this rank get an error."""
        self._finalizer()
        with suppress(KeyError, AttributeError):  # it was not needed; torch 2.11 cannot
            self.__dict__.pop("_gloo").shutdown()

    abort = shutdown

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce a tensor to all ranks, in place."""
        tensors, opts = as_list(tensors), options(opts, dist.AllreduceOptions)
        (tensor,) = tensors
        reduction = native_reduction(opts, tensor)
        if reduction is None:
            return self._elsewhere(Kind.ALL_REDUCE, tensor, opts, lambda gloo, flat: gloo.allreduce([flat], opts))

        def task() -> None:
            with WritableTensor(tensor) as dense:
                self._run(Kind.ALL_REDUCE, dense, dense.numel(), (), (dense.data_ptr(),), opts, reduction)

        return self._carry_out(task, opts, tensors)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce several tensors to all ranks, in place."""
        opts = options(opts, c10d.AllreduceCoalescedOptions)
        return self._all_of([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce a tensor to one rank, in place there."""
        opts = options(opts, c10d.ReduceOptions)
        (tensor,) = tensors
        reduction, root = native_reduction(opts, tensor), opts.rootRank
        if reduction is None:
            return self._elsewhere(Kind.REDUCE, tensor, opts, lambda gloo, flat: gloo.reduce([flat], opts))

        def task() -> None:
            with WritableTensor(tensor) as dense:
                everywhere = (dense.data_ptr(),) * self._num_ranks
                self._run(Kind.REDUCE, dense, dense.numel(), everywhere, everywhere, opts, reduction, root)

        return self._carry_out(task, opts, tensors)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Reduce a list of tensors, one for each rank, to that rank."""
        opts = options(opts, c10d.ReduceScatterOptions)
        (output,), (parts,) = outputs, inputs
        check_rank_parts("reduce_scatter", parts, output, self._num_ranks)
        reduction = native_reduction(opts, output)
        if reduction is None:
            flat_parts = [packed(part).view(-1) for part in parts]
            return self._elsewhere(
                Kind.REDUCE_SCATTER, output, opts, lambda gloo, flat: gloo.reduce_scatter([flat], [flat_parts], opts)
            )

        def task() -> None:
            dense = [packed(part) for part in parts]
            self._reduce_to_each(output, dense, addresses(dense), opts, reduction)

        return self._carry_out(task, opts, outputs)

    def reduce_scatter_single(self, output: _Tensor, tensor: _Tensor, opts: Any = None) -> Any:
        """Reduce the equal chunks of a tensor, one for each rank, to that rank."""
        opts = options(opts, c10d.ReduceScatterOptions)
        check_full("reduce_scatter", tensor, output, self._num_ranks)
        reduction, count = native_reduction(opts, output), output.numel()
        if reduction is None:
            return self.reduce_scatter([output], [packed(tensor).view(self._num_ranks, count).unbind()], opts)

        def task() -> None:
            dense = packed(tensor)
            self._reduce_to_each(output, (dense,), part_addresses(dense, (count,) * self._num_ranks), opts, reduction)

        return self._carry_out(task, opts, [output])

    def _reduce_to_each(self, output: _Tensor, read: _Tensors, parts: Sequence[int], opts: Any, reduction: int) -> None:
        # The output may be a slice of the input, which must stay as it is until all of it has been read.
        with WritableTensor(output, clear_of=read) as result:
            out = (result.data_ptr(),) * self._num_ranks
            self._run(Kind.REDUCE_SCATTER, result, result.numel(), parts, out, opts, reduction)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Reduce equal parts of several tensors."""
        opts = options(opts, c10d.ReduceScatterOptions)
        pairs = zip(outputs, inputs, strict=True)
        return self._all_of([self.reduce_scatter_single(to, tensor, opts) for to, tensor in pairs], outputs)

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Collect every rank's tensor in a list."""
        opts = options(opts, c10d.AllgatherOptions)
        (parts,), (tensor,) = outputs, inputs
        check_rank_parts("all_gather", parts, tensor, self._num_ranks)

        def task() -> None:
            own = packed(tensor)
            with WritableTensors(parts) as dense:
                self._run(Kind.ALL_GATHER, own, own.numel(), (own.data_ptr(),), addresses(dense), opts)

        return self._carry_out(task, opts, outputs)

    def all_gather_single(self, output: _Tensor, tensor: _Tensor, opts: Any = None) -> Any:
        """Join every rank's tensor to one."""
        opts = options(opts, c10d.AllgatherOptions)
        check_full("all_gather", output, tensor, self._num_ranks)

        def task() -> None:
            own = packed(tensor)
            with WritableTensor(output) as full:
                out = part_addresses(full, (own.numel(),) * self._num_ranks)
                self._run(Kind.ALL_GATHER, own, own.numel(), (own.data_ptr(),), out, opts)

        return self._carry_out(task, opts, [output])

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Join every rank's tensors, each to one."""
        opts = options(opts, c10d.AllgatherOptions)
        pairs = zip(outputs, inputs, strict=True)
        return self._all_of([self.all_gather_single(to, tensor, opts) for to, tensor in pairs], outputs)

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Collect every rank's tensors in a list for each rank."""
        opts = options(opts, c10d.AllgatherOptions)
        works = [self.allgather([[row[i] for row in outputs]], [tensor], opts) for i, tensor in enumerate(inputs)]
        return self._all_of(works, outputs)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Copy the root's tensor to all ranks."""
        opts = options(opts, c10d.BroadcastOptions)
        tensors = as_list(tensors)
        tensor, root = tensors[opts.rootTensor], opts.rootRank

        def task() -> None:
            with WritableTensor(tensor) as dense:
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
        """Send one chunk of a tensor to each rank, and concatenate the received ones."""
        opts = options(opts, c10d.AllToAllOptions)
        to, of = (split_lengths(*each, self._num_ranks) for each in ((output, output_splits), (tensor, input_splits)))
        is_even = not output_splits and not input_splits

        def task() -> None:
            dense = packed(tensor)
            with WritableTensor(output, clear_of=[dense]) as result:
                count = of[0] if is_even else 0  # all ranks compare it; of uneven parts each pair compares bytes
                sent, expected = part_addresses(dense, of), part_addresses(result, to)
                splits = None if is_even else [length * dense.itemsize for length in (*of, *to)]
                self._run(Kind.ALL_TO_ALL, dense, count, sent, expected, opts, splits=splits)

        return self._carry_out(task, opts, [output])

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Send a list of tensors, one to each rank, and collect what comes from them."""
        opts = options(opts, c10d.AllToAllOptions)
        check_length("all_to_all", outputs, self._num_ranks)
        check_length("all_to_all", inputs, self._num_ranks)

        def task() -> None:
            dense = [packed(tensor) for tensor in inputs]
            with WritableTensors(outputs) as results:
                splits = [tensor.numel() * tensor.itemsize for tensor in (*dense, *results)]
                self._run(Kind.ALL_TO_ALL, dense[0], 0, addresses(dense), addresses(results), opts, splits=splits)

        return self._carry_out(task, opts, outputs)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Collect every rank's tensor in a list of the root."""
        opts = options(opts, c10d.GatherOptions)
        (tensor,), root = inputs, opts.rootRank
        parts: _Tensors = outputs[0] if self._rank == root else ()
        if self._rank == root:
            check_rank_parts("gather", parts, tensor, self._num_ranks)

        def task() -> None:
            own = packed(tensor)
            with WritableTensors(parts) as dense:
                sent = (own.data_ptr(),) * self._num_ranks
                self._run(Kind.GATHER, own, own.numel(), sent, addresses(dense), opts, root=root)

        return self._carry_out(task, opts, outputs)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Send a list of the root's tensors, one to each rank."""
        opts = options(opts, c10d.ScatterOptions)
        (output,), root = outputs, opts.rootRank
        parts: _Tensors = inputs[0] if self._rank == root else ()
        if self._rank == root:
            check_rank_parts("scatter", parts, output, self._num_ranks)

        def task() -> None:
            dense = [packed(part) for part in parts]
            with WritableTensor(output) as result:
                out = (result.data_ptr(),) * self._num_ranks
                self._run(Kind.SCATTER, result, result.numel(), addresses(dense), out, opts, root=root)

        return self._carry_out(task, opts, outputs)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        opts = options(opts, c10d.BarrierOptions)
        return self._carry_out(lambda: self._run(Kind.BARRIER, _NOTHING, 0, (), (), opts), opts, [])

    def send(self, tensors: _Tensors, to: int, tag: int) -> Any:
        """Send a tensor to one rank."""
        (tensor,) = tensors
        check_peer(to, self._rank, self._num_ranks)
        dense = packed(tensor)
        return self._deliver(self._engine.send(to, tag, dense), dense)

    def recv(self, tensors: _Tensors, origin: int, tag: int) -> Any:
        """Receive a tensor from one rank."""
        (tensor,) = tensors
        check_peer(origin, self._rank, self._num_ranks)
        return self._receive(tensor, origin, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> Any:
        """Receive a tensor from whichever rank sends one first."""
        (tensor,) = tensors
        return self._receive(tensor, _ANYBODY, tag)

    def _receive(self, tensor: _Tensor, origin: int, tag: int) -> P2PWork:
        if not checked(tensor).is_contiguous():
            raise UnsupportedError(
                "A tensor to receive must be contiguous. Found one with strides "
                f"{tuple(tensor.stride())}. Receive a contiguous one and copy it."
            )
        return self._deliver(self._engine.receive(origin, tag, tensor), tensor)

    def _deliver(self, message: int, tensor: _Tensor) -> P2PWork:
        work = P2PWork(self._engine, message, tensor, self._seconds, self._messages.submit)
        if not self._engine.is_over(message):  # one that fitted into its ring is, and needs no thread
            self._caretaker.watch(work)
        return work

    def _carry_out(self, task: Callable[[], None], opts: Any, result: Any) -> Any:
        """Run a task at once if the caller waits and nothing is before it, else in the thread for collectives."""
        # Not while others are queued: it would overtake them, and the ranks would no longer call in one order.
        if not opts.asyncOp and self._collectives.is_idle:
            task()
            return CompletedWork(result)
        work = PendingWork(task, result)
        self._collectives.submit(work)
        return work

    def _all_of(self, works: Sequence[Any], result: Any) -> Any:
        """Combine several works into one, which ends with the last of them."""
        if not works:
            return CompletedWork(result)

        def wait() -> None:
            for work in works:
                work.wait()

        if all(isinstance(work, CompletedWork) for work in works):
            return CompletedWork(result)
        combined = PendingWork(wait, result)  # on the thread of all works, after them: no wait blocks that thread
        self._collectives.submit(combined)
        return combined

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
        *,
        is_elsewhere: bool = False,
    ) -> None:
        given = opts.timeout.total_seconds()  # negative if the caller gave none
        seconds = given if given > 0 else self._seconds
        self._engine.run(
            kind, tensor.dtype, count, inputs, outputs, seconds, reduction, root, splits, is_elsewhere=is_elsewhere
        )

    def _elsewhere(self, kind: Kind, tensor: _Tensor, opts: Any, call: Callable[[Any, _Tensor], Any]) -> Any:
        """Leave a collective to gloo, which takes no strides, once all ranks have said that they will."""

        def task() -> None:
            # Gloo compares nothing: if only some ranks went there, all would wait until their timeouts.
            number, root = reduction_number(opts), getattr(opts, "rootRank", -1)
            self._run(kind, tensor, tensor.numel(), (), (), opts, number, root, is_elsewhere=True)
            if tensor.layout is not torch.strided:
                call(self._gloo, tensor).wait()
                return
            with WritableTensor(tensor) as dense:
                call(self._gloo, dense.view(-1)).wait()

        return self._carry_out(task, opts, [tensor])

    @cached_property
    def _gloo(self) -> Any:
        # Connecting is collective; all ranks come here, as they have just agreed to leave this call to gloo.
        return c10d.ProcessGroupGloo(
            dist.PrefixStore("gloo/", self._store), self._rank, self._num_ranks, timeout=self._timeout
        )

    # Names of torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
