"""What metrics need: the values of all samples of a batch, on all ranks."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from colossal._src import comm
from colossal._src.booster.plugin.dataloader import ResumableLoader
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import equal_on_all_ranks, gather_objects, int64_digest
from colossal._src.pipeline import map_tensors, tensors_in
from colossal._src.tensor import DATA
from colossal.errors import ConfigError

_PURPOSE = "gathers samples for metrics"


@torch.no_grad()
def gather_samples(values: Any, dataloader: DataLoader[Any], mesh: ParallelMesh | None) -> Any:
    """Gather the values of a batch in the order of the loader's samples, without those that it repeated."""
    if not isinstance(dataloader, ResumableLoader):
        raise ConfigError(
            "Which samples of a batch were repeated is known of a loader from plugin.prepare_dataloader, without "
            f"distributed_sampler_cls. Found a {type(dataloader).__name__}. Make it there."
        )
    if mesh is not None:
        if mesh.size("pp") > 1:
            values = _take_from_last_stage(values, mesh)
        _check(values, mesh)
    num_samples = dataloader.num_new_samples
    return map_tensors(values, lambda tensor: _gather(tensor, mesh)[:num_samples])


def _gather(tensor: torch.Tensor, mesh: ParallelMesh | None) -> torch.Tensor:
    if mesh is None or mesh.size(DATA) == 1:
        return tensor.detach()
    gathered = comm.gather(tensor.detach(), DATA, 0, mesh)
    # rank r has every r-th sample
    return gathered.unflatten(0, (mesh.size(DATA), -1)).transpose(0, 1).flatten(0, 1)


def _take_from_last_stage(values: Any, mesh: ParallelMesh) -> Any:
    """Give the outputs that only the last stage has to all ranks of the pipeline, through host memory."""
    found: list[Any] = gather_objects(_to_host(values), [mesh.group("pp")], _PURPOSE)
    # other stages have None in the place of outputs, and may have labels as well
    full = max(found, key=lambda each: sum(1 for _ in tensors_in(each)))
    if not any(True for _ in tensors_in(full)):
        _refuse("none on any stage: pass return_outputs=True to execute_pipeline", mesh)
    return full


def _to_host(values: Any) -> Any:
    return None if values is None else map_tensors(values, lambda tensor: tensor.detach().cpu())


def _check(values: Any, mesh: ParallelMesh) -> None:
    """Reject what has no samples, and what differs between ranks where it must not, on all ranks."""
    tensors = list(tensors_in(values))
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    found: list[Any] = gather_objects(shapes, [mesh.group(DATA)], _PURPOSE)
    if any(not shape for each in found for shape, _ in each):
        _refuse("a tensor without dimensions, such as a mean loss", mesh)
    if any(each != found[0] for each in found):
        _refuse(f"on data-parallel ranks {found}", mesh)
    axes: Sequence[Axis] = ("tp", "sp") if mesh.tp_mode == "1d" else ("sp",)
    groups = [mesh.group(axis) for axis in axes if mesh.size(axis) > 1]
    if groups and not all(equal_on_all_ranks([int64_digest(*tensors)], groups)):
        _refuse(
            "other values on ranks that share tensors or sequences. Logits are sharded there: pass "
            "parallel_output=False to HybridParallelPlugin",
            mesh,
        )


def _refuse(found: str, mesh: ParallelMesh) -> NoReturn:
    raise ConfigError(
        "Metrics take tensors whose first dimension is that of the samples, of equal shapes on data-parallel ranks and "
        f"equal values on all others. Found {found}, on {mesh}. Pass predictions and labels, padded to one length."
    )
