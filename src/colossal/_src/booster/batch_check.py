"""Ranks that share tensors, sequences or layers of a replica see the same batch; others would train on silently."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import CallOfAllRanks, equal_on_all_ranks, gather_objects, int64_digest
from colossal._src.interface import Capabilities, Executor, ModelWrapper, OptimizerWrapper
from colossal._src.pipeline import tensors_in
from colossal.errors import ConfigError

_AXES: tuple[Axis, ...] = ("tp", "sp", "pp")


def compare_batches(
    model: ModelWrapper, capabilities: Capabilities, mesh: ParallelMesh, most: int | None
) -> Capabilities:
    """Compare what the ranks of one replica train on."""
    check = BatchComparer(mesh, most)
    if mesh.size("pp") == 1 or capabilities.executor is None:
        check.watch(model)
        return capabilities
    return replace(capabilities, executor=check.around(capabilities.executor))


@final
class BatchComparer:
    """Compares digests of the batches of the ranks of one replica."""

    def __init__(self, mesh: ParallelMesh, most: int | None) -> None:
        # On a grid the program splits the inputs among the ranks of tp, before the model gets them.
        axes: Sequence[Axis] = _AXES if mesh.tp_mode == "1d" else ("sp", "pp")
        self._groups = [mesh.group(axis) for axis in axes if mesh.size(axis) > 1]
        self._most, self._num_seen = most, 0

    def watch(self, model: ModelWrapper) -> None:
        """Look at what the model is called with."""
        if not self._is_over:
            hook = model.register_forward_pre_hook(lambda _, *inputs: self._see(inputs, hook.remove), with_kwargs=True)

    def around(self, executor: Executor) -> Executor:
        """Look at the batches that an executor takes."""
        return executor if self._is_over else _CheckedExecutor(executor, self)

    def iterate(self, data_iter: Iterator[Any]) -> Iterator[Any]:
        """Go through batches, and compare each; a rank that has none left says so as well."""
        for batch in data_iter:
            self._see(batch)
            yield batch
        self._see(None)

    @property
    def _is_over(self) -> bool:
        return not self._groups or (self._most is not None and self._num_seen >= self._most)

    def _see(self, inputs: Any, finish: Callable[[], None] = lambda: None) -> None:
        if self._is_over:
            finish()
            return
        number, self._num_seen = self._num_seen, self._num_seen + 1
        digest = _digest(inputs)
        with CallOfAllRanks("of a replica call the model on the same batches, as many of them,"):
            is_equal = all(equal_on_all_ranks([digest], self._groups))
        if is_equal:
            return
        found = gather_objects((dist.get_rank(), digest), self._groups, "compares its batches")
        others = [rank for rank, each in sorted(found) if each != min(found)[1]]
        raise ConfigError(
            "Ranks of the same replica, under tensor, sequence or pipeline parallelism, must see the same batches. "
            f"Found a different batch {number} on rank {', '.join(map(str, others))} than on rank {min(found)[0]}. "
            "Make the DataLoader by plugin.prepare_dataloader, and seed random transforms equally on these ranks."
        )


@final
class _CheckedExecutor:
    """An executor whose batches are compared first."""

    def __init__(self, executor: Executor, check: BatchComparer) -> None:
        self._executor, self._check = executor, check

    def __call__(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run the next batch; see `Executor`."""
        return self._executor(self._check.iterate(data_iter), criterion, optimizer, return_loss, return_outputs)


def _digest(inputs: Any) -> int:
    """Hash the tensors of a batch."""
    contents: list[str | torch.Tensor] = [repr(type(inputs))]
    for tensor in tensors_in(inputs):
        contents.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        if not tensor.is_meta:
            contents.append(tensor)
    return int64_digest(*contents)
