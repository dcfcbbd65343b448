"""What an optimizer holds of a model under ZeRO: this rank's shard of every parameter."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn, final
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from colossal._src.amp import DataAliases, MasterParams
from colossal._src.comm import CallOfAllRanks, Partition, PendingComm
from colossal._src.interface import rebind_param_groups, refuse_copy
from colossal._src.tensor import copy_placement, grad_of, placement_of, set_grad
from colossal._src.zero.bucket import Bucket
from colossal._src.zero.buffer_pool import BufferPool
from colossal._src.zero.flat_parameters import FlatParameters
from colossal._src.zero.reducer import Reducer
from colossal._src.zero.zero_config import ZeroConfig
from colossal.errors import ConfigError

_IS_LOST = 2  # in place of whether a bucket is waiting
_LOST = (
    "Buckets hold the gradients, of which the boosted optimizer has views, until its zero_grad(). Found that on a rank "
    ".grad is None of what it updates, after a step, and gradients of another backward pass, which would be added to "
    "those before. Discard gradients by zero_grad() of the boosted optimizer or model on all ranks, also where another "
    "optimizer or a scheduler is built around it."
)


def _shard_like(value: torch.Tensor, shard: nn.Parameter) -> torch.Tensor:
    sharded = copy_placement(torch.empty(shard.shape, dtype=value.dtype, device=shard.device), shard)
    for region, view in placement_of(sharded).local_views(sharded):
        view.copy_(value[region.slices])
    return sharded


@final
class ZeroShards(MasterParams):
    """Replaces the parameters of a model by this rank's shards of them, in the user's own optimizer.

    Each rank updates its shards, which have the same size on all ranks, and then gathers those of the other ranks.
    Parameters of the model become views of common buffers; they keep their names, shapes and values.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
    https://arxiv.org/abs/1910.02054, sections 5.1 and 5.2.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        order: Iterable[nn.Parameter],
        partition_of: Callable[[nn.Parameter], Partition],
        config: ZeroConfig,
        chunks: Callable[[Sequence[nn.Parameter]], Sequence[FlatParameters]] | None = None,
        agree: Callable[[list[int]], list[int]] | None = None,
        reserve: Callable[[int], None] | None = None,
    ) -> None:
        self.pairs: dict[nn.Parameter, nn.Parameter] = {}
        self._aliases = DataAliases()
        self.buckets: list[FlatParameters] = []
        self._places: dict[nn.Parameter, tuple[FlatParameters, int]] = {}  # the bucket of each working parameter
        self._chunks_of, self._largest_of = chunks, agree
        self._optimizer, self._partition_of, self._config = optimizer, partition_of, config
        self._pool, self._scratch = BufferPool(), BufferPool()
        self._reducer = Reducer(config, reserve)
        self._handles: list[RemovableHandle] = []
        self._num_pulled: int | None = None  # the changes that the gradients of the shards have seen
        self._used: list[list[bool]] = []
        self._gathers: dict[FlatParameters, PendingComm] = {}
        self._offloaded: dict[
            torch.Tensor, FlatParameters
        ] = {}  # the buckets whose shards are not where it is computed
        self._updated: set[torch.Tensor] = set()  # in this step
        self._has_stepped = False
        self._writer: Any = (
            optimizer if hasattr(optimizer, "set_param_copies") else None
        )  # those of colossal.nn.optimizer
        # weak, as all that the optimizer calls: it is an attribute here, and both would wait for the garbage collector
        self._handles.append(optimizer.register_step_post_hook(partial(_after_step, ref(self))))
        places = {parameter: place for place, parameter in enumerate(order)}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # backward passes bring the gradients of the last layers first: in this order buckets fill one after the other
        self._shard_params(sorted(held, key=lambda each: places.get(each, -1), reverse=True))

    def add_group(self, group: dict[str, Any]) -> Mapping[nn.Parameter, nn.Parameter]:
        """Share the parameters of a group that was added to the optimizer.

        Communication: all_gather, dp, the parameters' bytes: all ranks begin with the values of the owners.
        """
        before = len(self.buckets)
        added = self._shard_params(list(reversed(group["params"])))
        for bucket in self.buckets[before:]:
            bucket.start_gather().wait()
        return added

    def backward_pass(self) -> AbstractContextManager[Any]:
        """Open the context in which gradients of the working parameters are computed.

        Communication: reduce_scatter, dp, the gradients' bytes; none inside of `no_sync`.
        """
        return self._reducer.backward_pass()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full gradients on each rank instead of reducing them."""
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    def copy_grads_to_masters(self) -> None:
        """Give each shard its averaged gradient; none to shards of parameters that no rank has used.

        Communication: all_reduce, dp, 4 bytes for each parameter: the ranks agree on what was used. Gradients that no
        backward pass has reduced, such as those of `no_sync`, are reduced.
        """
        self.wait()
        self._reducer.finish()
        written = self._aliases.take()
        for bucket in self.buckets:
            bucket.refresh(written=written)
        waiting = [bucket.take_assigned() or bucket.is_waiting for bucket in self.buckets]
        if self._num_pulled == self._reducer.num_changes and not any(waiting):
            return
        # a bucket that any rank has to reduce is reduced by all: else that rank would wait for the others forever
        own = [_IS_LOST if is_lost else flag for is_lost, flag in zip(self._lost(), waiting, strict=True)]
        used, waiting = self._agree(own)
        if _IS_LOST in waiting:
            raise ConfigError(_LOST)
        self._used = used
        self._reducer.reduce([bucket for bucket, is_waiting in zip(self.buckets, waiting, strict=True) if is_waiting])
        for bucket, used in zip(self.buckets, self._used, strict=True):
            if bucket.grad_shard is not None:
                for (shard, grad), is_used in zip(bucket.grads(), used, strict=True):
                    # for a zero gradient an optimizer would still decay weights and moments; for none it does nothing
                    set_grad(shard, grad if is_used else None)
        self._num_pulled = self._reducer.num_changes

    def _lost(self) -> list[bool]:
        """Say which buckets have a gradient that the program discarded where it is handed out, and not where it is."""
        if self._num_pulled is None:
            return [False] * len(self.buckets)
        used = [*self._used, *[[]] * (len(self.buckets) - len(self._used))]  # none yet of a group that was added
        return [
            any(is_used and grad_of(shard) is None for shard, is_used in zip(bucket.shards, flags, strict=False))
            for bucket, flags in zip(self.buckets, used, strict=True)
        ]

    def copy_params_from_masters(self) -> None:
        """Gather the updated parameters from the ranks that own them.

        Communication: all_gather, dp, the parameters' bytes.
        """
        after_step, self._has_stepped = self._has_stepped, False
        # in the order of the forward pass, so that the first layers can begin first
        changed = [bucket for bucket in reversed(self.buckets) if bucket.grad_shard is not None or not after_step]
        is_written = after_step and self._writer is not None
        self._gathers = {bucket: bucket.start_gather(is_written=is_written) for bucket in changed}
        if not self._config.overlap_allgather:
            self.wait()

    def copy_written(self) -> None:
        """Gather shards that a program wrote, which all ranks do at the same places.

        Communication: all_gather, dp, the bytes of their buckets.
        """
        written = [bucket for bucket in self.buckets if bucket.is_written]
        if not written:
            return
        for bucket in written:
            bucket.check_written_once()
        self.wait()
        with CallOfAllRanks("write what an optimizer holds, by loops over optimizer.param_groups,"):
            for bucket in written:
                bucket.start_gather().wait()

    def __deepcopy__(self, _memo: object) -> NoReturn:
        """Refuse: a module waits for these before it runs, and its copy would run before values are there."""
        refuse_copy("buckets that are gathered during forward passes (overlap_allgather=True)")

    def wait(self, buckets: Iterable[FlatParameters] | None = None) -> None:
        """Wait until updated parameters are here."""
        for bucket in list(self._gathers) if buckets is None else buckets:
            if bucket in self._gathers:
                self._gathers.pop(bucket).wait()

    def refresh(self) -> None:
        """Take the values of the working parameters over into the shards."""
        # values that somebody wrote since the last step must be in the shards before these are updated
        for bucket in self.buckets:
            bucket.refresh(only_written=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw the gradients of the working parameters away."""
        self._reducer.reset()
        self._num_pulled = None
        for bucket in self.buckets:
            bucket.discard() if set_to_none else bucket.fill_with_zeros()

    def expect_writes(self, working: nn.Parameter, values: torch.Tensor) -> None:
        """Take note of a tensor by which a program may write a parameter."""
        self._aliases.add(working, values)

    def holds_grad(self, working: nn.Parameter) -> bool:
        """Return whether a gradient of a parameter is in its bucket."""
        bucket, index = self._places.get(working, (None, 0))
        return bucket is not None and bucket.holds_grad(index)

    def has_grad_for(self, master: nn.Parameter) -> bool:
        """Return whether gradients of a shard's parameter came since the shards last got theirs."""
        working = self.pairs.get(master)
        if working is None or (self._num_pulled == self._reducer.num_changes and grad_of(working) is None):
            return False
        return grad_of(working) is not None or self.holds_grad(working)

    def close(self) -> None:
        """Stop watching gradients."""
        for handle in self._handles:
            handle.remove()

    def _shard_params(self, parameters: list[nn.Parameter]) -> Mapping[nn.Parameter, nn.Parameter]:
        """Find the buffers of parameters, and put their shards into the groups of the optimizer."""
        buckets = (self._chunks_of or self._make_buckets)(parameters)
        shards = {
            parameter: shard
            for bucket in buckets
            for parameter, shard in zip(bucket.parameters, bucket.shards, strict=True)
        }
        rebind_param_groups(self._optimizer, shards, _shard_like)
        new = [bucket for bucket in buckets if bucket not in self.buckets]
        self._handles += self._reducer.watch(new)
        self.buckets += new
        self._places |= {own: (bucket, at) for bucket in new for at, own in enumerate(bucket.parameters)}
        added = {shards[parameter]: parameter for parameter in parameters}
        self.pairs |= added
        if self._writer is not None:
            self._writer.set_param_copies(
                {
                    shard: copy
                    for bucket in self.buckets
                    for shard, copy in bucket.targets.items()
                    if shard in self.pairs
                }
            )
            self._offloaded = {
                shard: bucket for bucket in self.buckets if _is_offloaded(bucket) for shard in bucket.shards
            }
            if self._offloaded:
                runs = [bucket.shards for bucket in self.buckets if _is_offloaded(bucket)]
                self._writer.set_update_hook(runs, partial(_upload, ref(self)))
        return added

    def start_uploads(self, updated: Sequence[torch.Tensor]) -> None:
        """Begin to copy the buckets of which these shards are the last to be updated."""
        self._updated.update(updated)
        for bucket in {self._offloaded[shard] for shard in updated if shard in self._offloaded}:
            trained = (shard for shard in bucket.shards if shard in self.pairs and grad_of(shard) is not None)
            # a copy that begins earlier would miss the updates of the other shards of the bucket
            if self._updated.issuperset(trained):
                bucket.start_upload()

    def _make_buckets(self, parameters: Sequence[nn.Parameter]) -> list[FlatParameters]:
        runs = _runs(parameters, self._config.bucket_numel, self._partition_of)
        return [Bucket(run, self._partition_of(run[0]), self._config, self._pool, self._scratch) for run in runs]

    def finish_step(self) -> None:
        """Take note that all shards were updated."""
        self._has_stepped = True
        self._updated.clear()

    def _agree(self, waiting: Sequence[int]) -> tuple[list[list[bool]], list[int]]:
        """Find the parameters that any rank has used, and the buckets that any rank has yet to reduce, or has lost."""
        flags = [[is_waiting, *map(int, bucket.used)] for bucket, is_waiting in zip(self.buckets, waiting, strict=True)]
        for partition in dict.fromkeys(bucket.partition for bucket in self.buckets):
            places = [at for at, bucket in enumerate(self.buckets) if bucket.partition == partition]
            agreed = iter(self._take_largest([each for at in places for each in flags[at]], partition))
            for at in places:
                flags[at] = [next(agreed) for _ in flags[at]]
        return [list(map(bool, used)) for _, *used in flags], [is_waiting for is_waiting, *_ in flags]

    def _take_largest(self, values: list[int], partition: Partition) -> list[int]:
        if self._largest_of is not None:
            return self._largest_of(values)
        if partition.world_size == 1 or not values:
            return values
        # on the host, where these facts are: no device has to be waited for (docs/decisions/0010)
        return partition.total(torch.tensor(values, dtype=torch.int32, device="cpu"), "max").tolist()


def _after_step(shards: ref[ZeroShards], *_step: Any) -> None:
    if (own := shards()) is not None:
        own.finish_step()


def _upload(shards: ref[ZeroShards], updated: Sequence[torch.Tensor]) -> None:
    if (own := shards()) is not None:
        own.start_uploads(updated)


def _is_offloaded(bucket: FlatParameters) -> bool:
    return bucket.has_copy and not bucket.targets


def _runs(
    parameters: Sequence[nn.Parameter], most: int, partition_of: Callable[[nn.Parameter], Partition]
) -> list[list[nn.Parameter]]:
    """Split a list into runs of one kind, none of which is longer than `most` elements unless it is one parameter."""

    def key(each: nn.Parameter) -> Any:
        return partition_of(each), str(each.device), each.dtype, each.requires_grad

    open_runs: dict[Any, list[nn.Parameter]] = {}
    done: list[list[nn.Parameter]] = []
    for parameter in dict.fromkeys(parameters):
        run = open_runs.setdefault(key(parameter), [])
        if run and sum(each.numel() for each in run) + parameter.numel() > most:
            done.append(open_runs.pop(key(parameter)))
            run = open_runs.setdefault(key(parameter), [])
        run.append(parameter)
    return done + list(open_runs.values())
