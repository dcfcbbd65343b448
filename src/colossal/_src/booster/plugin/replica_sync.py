"""What stays replicated under sharding: initial values, buffers, and parameters that are scalars."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel, equal_on_all_ranks, equal_text_on_all_ranks, int64_digest
from colossal._src.lazy import (
    LazyTensor,
    RecordedOperation,
    describe_operation,
    lazy_tensors,
    materialize,
    recorded_operations,
    rng_states_of,
)
from colossal._src.tensor import (
    DATA,
    Replicas,
    broadcast_values,
    grad_of,
    group_by_replicas,
    is_dtensor,
    placement_of,
    replicas_of,
    set_grad,
)
from colossal.errors import ConfigError

_NAMES_SHOWN = 3


def check_same_lazy_tensors(lazy: Mapping[str, bool], mesh: ParallelMesh) -> None:
    """Make sure that the ranks of the dp axis built the same tensors lazily, whose values they draw together.

    Communication: all_reduce, dp, 16 bytes.
    """
    if not equal_text_on_all_ranks(repr(lazy), [mesh.group(DATA)]):
        raise ConfigError(
            f"All ranks build the same tensors lazily. Found that another rank differs from rank {mesh.global_rank}, "
            f"which built {sum(lazy.values())} of {len(lazy)} lazily. "
            "Enter LazyInitContext in the same places on all ranks."
        )


def check_equal_digests(digests: Mapping[str, int], mesh: ParallelMesh) -> None:
    """Make sure that the ranks of the dp axis start from the same values, of which each keeps a shard.

    Communication: all_reduce, dp, 16 bytes; if values differ, 16 bytes for each tensor more.
    """
    groups = [mesh.group(DATA)]
    if not equal_text_on_all_ranks(repr(list(digests.values())), groups):
        equal = equal_on_all_ranks(list(digests.values()), groups)
        different = [name for name, same in zip(digests, equal, strict=True) if not same]
        shown = ", ".join(different[:_NAMES_SHOWN]) + (", ..." if len(different) > _NAMES_SHOWN else "")
        raise ConfigError(
            f"All ranks start from the same values, of which each keeps a shard. Found {len(different)} tensors that "
            f"differ: {shown}. Set the same seed on all ranks, or pass sync_module_states=True to start from the "
            "values of rank 0."
        )


def broadcast_buffers_before_forward(model: nn.Module, mesh: ParallelMesh) -> None:
    """Give all ranks of the dp axis the buffers of its first before each forward pass, as DistributedDataParallel does.

    Only buffers that checkpoints hold, such as the running means of batch normalization: all ranks compute the others.
    """
    names, own = list(persistent_buffers(model)), ref(model)  # weak, as the model holds the hook

    def broadcast(called: nn.Module, *_inputs: Any) -> None:
        if called is not own():  # a copy, which one rank may evaluate
            return
        # looked up in each pass: a module may have replaced the buffer by another tensor
        Channel(DATA, mesh).broadcast(map(called.get_buffer, names))

    if mesh.size(DATA) > 1 and names:
        model.register_forward_pre_hook(broadcast)


def check_averaged(optimizer: Optimizer, mesh: ParallelMesh) -> None:
    """Refuse a step by gradients that `no_sync` accumulated, unless the program has averaged them itself.

    Communication: all_reduce, dp, 16 bytes for each group of replicas; pp, tp and dp, 16 bytes; not counted.
    """
    held = [each for group in optimizer.param_groups for each in group["params"]]  # may be master weights
    held = [each for each in held if not is_dtensor(each)]  # FSDP2 keeps those of each rank elsewhere
    is_equal = True
    for replicas, parameters in group_by_replicas(held, mesh).items():
        grads = [grad.to_dense() if grad.is_sparse else grad for grad in map(grad_of, parameters) if grad is not None]
        is_equal &= all(equal_on_all_ranks([int64_digest(*grads)], [replicas.group]))
    # also on ranks of other stages and shards, which may train nothing that differs
    everywhere = equal_on_all_ranks([is_equal], [mesh.group(axis) for axis in ("pp", "tp", DATA)])
    if not (is_equal and all(everywhere)):
        raise ConfigError(UNAVERAGED)


UNAVERAGED = (
    "A step needs gradients that are averaged over the ranks. Found some that were accumulated inside of no_sync and "
    "not averaged since. Run the last backward pass before a step outside of no_sync, or call zero_grad() to discard "
    "them."
)


@final
class GradientSync:
    """Whether backward passes average gradients, and whether the last one left those of this rank (`no_sync`)."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh, self.enabled, self.is_accumulating = mesh, True, False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave gradients as they are on each rank."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def record_pass(self) -> bool:
        """Take note of a pass; return whether it averages."""
        self.is_accumulating = not self.enabled
        return self.enabled

    def reset(self) -> None:
        """Forget the last pass, whose gradients are discarded."""
        self.is_accumulating = False

    def check(self, optimizer: Optimizer, *_step: Any) -> None:
        """Refuse a step after a pass that did not average; communication: as of `check_averaged`, after such a pass."""
        if self.is_accumulating:
            check_averaged(optimizer, self.mesh)


@final
class HookedAverager:
    """Averages gradients one by one, of parameters that others leave out: scalars under FSDP2, experts under DDP.

    A gradient is averaged over the ranks that hold the same shard. If it is of the samples of other ranks as well, each
    pass scales what it adds, so that the sum of several passes may be averaged at once, or one after the other: what
    was averaged before is the same on all ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: ParallelMesh) -> None:
        self.sync = GradientSync(mesh)
        for parameter in parameters:
            replicas = replicas_of(parameter, mesh)
            if not replicas.has_others:
                continue
            trains = parameter.requires_grad
            # also one that is thawed later: torch takes hooks only of what trains, and keeps them
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(partial(self._average, replicas))
            parameter.requires_grad_(trains)
            replicas.scale_each_pass(parameter)

    def _average(self, replicas: Replicas, parameter: torch.Tensor) -> None:
        if self.sync.record_pass() and (grad := grad_of(parameter)) is not None:
            set_grad(parameter, replicas.channel().all_reduce(grad) / replicas.size)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Find the buffers that checkpoints hold."""
    return {f"{path}.{name}".removeprefix("."): getattr(module, name) for path, module, name in _persistent(model)}


def _persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 (torch has no public name for it)
                yield path, module, name


def broadcast_initial_values(module: nn.Module, mesh: ParallelMesh) -> None:
    """Broadcast the values of the first ranks of the tp, sp and dp axes; lazy tensors stay lazy.

    Of a model that is built lazily, ranks only exchange what random numbers are drawn from: each makes, or reads from
    files, what it needs. Where ranks have built in different ways, all values are made, and sent.

    Communication: broadcast, tp, sp and dp, 5 KB for each random operation of lazy tensors, and the bytes of others;
    all_reduce, 16 bytes.
    """
    lazy = list(dict.fromkeys(lazy_tensors(module)))
    operations = recorded_operations(lazy)
    if not equal_text_on_all_ranks(_describe(module, operations), [mesh.group(axis) for axis in (DATA, "tp", "sp")]):
        # ranks that recorded different operations would draw different values: only values themselves can be sent
        materialize(module)
        operations = []
    tensors = dict.fromkeys((*module.parameters(), *module.buffers()))
    values = [each for each in tensors if not isinstance(each, LazyTensor)]
    broadcast_values([*values, *rng_states_of(operations)], mesh, also=("tp", "sp"))


def _describe(module: nn.Module, operations: Sequence[RecordedOperation]) -> str:
    named = (*module.named_parameters(), *module.named_buffers())
    lines = [f"{name} {placement_of(each).shape} {each.dtype} {type(each).__name__}" for name, each in named]
    return "\n".join([*lines, *map(describe_operation, operations)])
