# pyright: reportUnknownMemberType=false
"""Which process group communicates a tensor: the accelerator's backend for its tensors, another for host tensors."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from colossal.accelerator import Accelerator
from colossal.errors import ConfigError, UnsupportedError

# [Note: what is agreed on the host]
# Ranks agree on small facts many times in a step: which parameters were used, whether batches have the same shape. In
# accelerator memory, each such fact would synchronize the host with the device twice. So a group on an accelerator has
# a host group, with the same ranks and a CPU backend, for facts that are produced and used on the host.

_OF_HOST = ("gloo", "shm", "fake", "threaded", "mpi", "undefined")
# Weak, so that a host group ends with the group that it is for.
_HOST_GROUPS: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()


def group_for(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group that communicates a tensor.

    Communication: as in `host_group`, if the tensor is in host memory.
    """
    return host_group(group) if tensor.is_cpu else group


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return a group of the same ranks that communicates tensors in host memory.

    Communication: on the first call for a group, all its ranks open connections; they must call together.
    """
    found = group or dist.group.WORLD
    assert found is not None
    if dist.get_backend(found).partition(",")[0].removeprefix("cpu:") in _OF_HOST:
        return found
    if found not in _HOST_GROUPS:
        _HOST_GROUPS[found] = _make_host_group(dist.get_process_group_ranks(found))
    return _HOST_GROUPS[found]


def _make_host_group(ranks: list[int]) -> dist.ProcessGroup:
    try:
        created = dist.new_group(ranks, backend="shm", use_local_synchronization=True)
    except UnsupportedError:  # on all of them
        created = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(created, dist.ProcessGroup)
    return created


def is_default(backend: str | None, accelerator: Accelerator) -> bool:
    """Return whether a backend is the documented default, that of GPUs, or the accelerator's own."""
    own = () if accelerator.is_cpu else (accelerator.communication_backend,)
    return backend is not None and backend.lower() in ("nccl", *own)


def check_backend(backend: str, accelerator: Accelerator) -> None:
    """Raise a ConfigError if torch lacks a backend, or it does not move tensors of the device."""
    for name in (part.split(":")[-1] for part in backend.lower().split(",")):
        if not dist.is_backend_available(name):
            raise ConfigError(
                f"The backend must be built into torch. Found {name!r}, which this torch lacks. "
                f"Leave backend out to use {accelerator.communication_backend!r}."
            )
    if "shm" in backend.lower() and (backend.lower() != "shm" or not accelerator.is_cpu):
        raise ConfigError(
            f"The backend 'shm' moves tensors in host memory, and stands alone. Found {backend!r} for the device "
            f"{accelerator.name!r}. Use {accelerator.communication_backend!r}, or put 'gloo' in its place."
        )
    if accelerator.name not in (served := _served_devices(backend.lower())):
        stay = "" if accelerator.is_cpu else ", or stay on the CPU with COLOSSAL_DEVICE=cpu"
        raise ConfigError(
            f"The backend must move tensors of the device {accelerator.name!r}. Found {backend!r}, which moves those "
            f"of {' and '.join(map(repr, served))}. Leave backend out to use "
            f"{accelerator.communication_backend!r}{stay}."
        )


def _served_devices(backend: str) -> list[str]:
    """Return the types of device whose tensors a backend moves, as torch reads its name."""
    if ":" in backend:
        return [part.partition(":")[0] for part in backend.split(",")]
    return dist.Backend.backend_capability[backend]
