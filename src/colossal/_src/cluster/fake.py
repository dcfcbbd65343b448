"""Be one rank of a job whose other ranks are not there: the process group of torch's tests, which sends nothing."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from colossal._src.cluster.mesh import set_ambient_mesh
from colossal.accelerator import get_accelerator


@contextmanager
def fake_world(size: int, rank: int = 0) -> Generator[None]:
    """Be one rank of a fake process group: collectives return at once, with arbitrary values.

    For meshes, plans, errors and counts of communication, at any size.

    Args:
        size: Number of ranks.
        rank: The rank that this process is.

    Communication: none, whatever runs inside: this is what it is for.

    Example:
        >>> from torch import distributed as dist
        >>> from colossal.testing import fake_world
        >>> with fake_world(512, rank=3):
        ...     print(dist.get_rank(), dist.get_world_size())
        3 512
    """
    serve_accelerator("fake")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        set_ambient_mesh(None)
        dist.destroy_process_group()


def serve_accelerator(backend: str) -> None:
    """Let a backend of tests take tensors of this machine's accelerator: torch names some, and no other."""
    served = dist.Backend.backend_capability[backend]
    if (name := get_accelerator().name) not in served:
        served.append(name)
