"""Whether a gradient of any rank has overflowed: found while gradients are unscaled, and agreed on over ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import distributed as dist

from colossal._src.comm import all_reduce_over
from colossal._src.tensor import comm_device, grad_of, is_placed, local_of, placement_of
from colossal.errors import ConfigError


def unscale_and_find_overflow(
    parameters: list[torch.nn.Parameter],
    scale: float,
    device_type: str,
    peers: Iterable[dist.ProcessGroup] = (),
    *,
    allow_fp16: bool,
) -> torch.Tensor:
    """Divide the gradients by the scale, and return 1 if one of any rank was infinite or NaN, else 0.

    Communication: all_reduce, the axes that shard or replicate a parameter and `peers`, 4 bytes each.
    """
    found = _unscale_local(parameters, scale, device_type, allow_fp16=allow_fp16)
    by_parameter = [(parameter, placement_of(parameter).groups) for parameter in parameters if is_placed(parameter)]
    placed = [parameter for parameter, own in by_parameter if own]
    groups = dict.fromkeys(group for _, own in by_parameter for group in own)
    # The ranks of a stage agree before stages do: those have other groups, and a maximum that goes through
    # groups in different orders is not the same everywhere.
    found = found.to(comm_device(placed[0]) if placed else device_type)
    return all_reduce_over(found, [*groups, *peers], "max")


def _unscale_local(
    parameters: list[torch.nn.Parameter], scale: float, device_type: str, *, allow_fp16: bool
) -> torch.Tensor:
    """Divide the local gradient shards, and return 1 if one of them was infinite or NaN, else 0."""
    found = torch.zeros((), device=device_type)
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in _local_grads(parameters, allow_fp16=allow_fp16):
        by_device[grad.device].append(grad)
    for device, grads in by_device.items():
        here = torch.zeros((), device=device)
        inverse = torch.full((), 1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, here, inverse)
        found = torch.maximum(found, here.to(found.device))
    return found


def _local_grads(parameters: list[torch.nn.Parameter], *, allow_fp16: bool) -> Iterator[torch.Tensor]:
    """Yield what this rank holds of each gradient; of a sparse one its values."""
    for grad in map(grad_of, parameters):
        if grad is None:
            continue
        if grad.dtype == torch.float16 and not allow_fp16:
            raise ConfigError(
                "Gradients are divided by the loss scale in float32. Found gradients in float16, of parameters in "
                "float16. Leave the model in float32, or pass mixed_precision='fp16_naive', which keeps float32 "
                "copies of the parameters."
            )
        local = local_of(grad)
        yield local._values() if local.is_sparse else local  # noqa: SLF001 (values() wants a coalesced tensor)
